// SPDX-License-Identifier: BSD-3-Clause
// Compares the kernels with naive arithmetic on lists of raw memory, without torch, so that sanitizers check
// nothing but the kernels.
//
// Every call runs with several grids and orders of blocks and threads, and must give the same bits. The
// argument "quick" skips what would take long where every CUDA thread is a system thread.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>

#include "../../../csrc/cuda/kernels.cuh"
#include "lists.h"

using namespace fastclip;
using namespace fastclip::cuda;

namespace {

bool quick = false;
int64_t checks = 0, failures = 0;

void expect(bool holds, const char* what, const std::string& where) {
  ++checks;
  if (holds) return;
  if (++failures <= 20) std::printf("FAILED: %s, %s\n", what, where.c_str());
}

// The results of one call, and the gradients after it.
struct Outcome {
  std::vector<double> stats;
  std::vector<double> result;
  List list;

  bool operator==(const Outcome& other) const {
    return same_bits(stats, other.stats) && same_bits(result, other.result) && list == other.list;
  }
};

// A workspace of exactly `size` bytes, filled with garbage.
std::vector<char> garbage(size_t size) { return std::vector<char>(size, static_cast<char>(0xa5)); }

using Call = std::function<void(const LaunchPlan&, Outcome&)>;

// Runs the call under every grid and order, and returns the outcome of the first.
Outcome run(const List& list, uint32_t groups, const Call& call, const std::string& where) {
  Outcome first;
  bool is_first = true;
  const std::vector<std::pair<int, unsigned>> settings =
      quick ? std::vector<std::pair<int, unsigned>>{{2, 0}}
            : std::vector<std::pair<int, unsigned>>{{1, 0}, {2, 1}, {3, 2}, {7, 3}};
  for (const auto& [blocks, seed] : settings) {
    fastclip_shim::settings() = {blocks, seed};
    Outcome outcome;
    outcome.list = list;
    outcome.stats.assign(3 * list.size(), NAN);
    call(LaunchPlan(outcome.list.items(), groups), outcome);
    if (is_first) {
      first = outcome;
    } else {
      expect(outcome == first, "the same bits with another grid", where);
    }
    is_first = false;
  }
  return first;
}

StatisticsOptions options_for(const List& list, uint32_t groups, Outcome& outcome, int columns) {
  StatisticsOptions options = {};
  options.num_groups = groups;
  options.groups_sorted = list.groups_sorted();
  options.float64 = true;
  outcome.result.assign(groups * columns, NAN);
  options.result = outcome.result.data();
  return options;
}

bool close(double actual, double exact, double tolerance) {
  if (std::isnan(exact)) return std::isnan(actual);
  if (std::isinf(exact) || exact == 0) return actual == exact;
  return std::fabs(actual / exact - 1) <= tolerance;
}

double root(double value, Norm norm) { return norm == kNorm2 ? std::sqrt(value) : value; }

void check_statistics(const List& list, Norm norm, bool finite_only, const std::string& where) {
  const uint32_t groups = list.num_groups();
  const Outcome outcome = run(
      list, groups,
      [&](const LaunchPlan& plan, Outcome& out) {
        StatisticsOptions options = options_for(list, groups, out, 1);
        options.finite_only = finite_only;
        std::vector<char> workspace = garbage(plan.workspace_bytes());
        plan.statistics(norm, options, out.stats.data(), workspace.data(), nullptr);
      },
      where);
  expect(outcome.list == list, "gradients that are only read are unchanged", where);
  std::vector<double> totals(groups);
  for (size_t g = 0; g < list.size(); ++g) {
    const Naive exact = naive(list[g], norm, finite_only);
    const double* row = &outcome.stats[3 * g];
    expect(close(root(row[0], norm), root(exact.value, norm), 1e-6), "norm of a gradient", where);
    expect(row[1] == exact.nan_count && row[2] == exact.inf_count, "counts of a gradient", where);
    double& total = totals[list[g].group];
    total = norm != kNormInf                                 ? total + exact.value
            : exact.value > total || std::isnan(exact.value) ? exact.value
                                                             : total;
  }
  for (uint32_t g = 0; g < groups; ++g) {
    expect(close(outcome.result[g], root(totals[g], norm), 1e-6), "norm of a group", where);
  }
}

void check_clip(const List& list, NonFinite mode, double max_norm, const std::string& where) {
  const uint32_t groups = list.num_groups();
  const double inv_scale = 0.5;
  const Outcome outcome = run(
      list, groups,
      [&](const LaunchPlan& plan, Outcome& out) {
        StatisticsOptions options = options_for(list, groups, out, 3);
        options.clip = true;
        options.nonfinite = mode;
        options.finite_only = mode == NonFinite::kZero;
        options.max_norm = max_norm;
        options.inv_scale = {&inv_scale, true, false};
        std::vector<char> workspace = garbage(plan.workspace_bytes());
        plan.statistics(kNorm2, options, out.stats.data(), workspace.data(), nullptr);
        plan.apply_clip(options.finite_only, workspace.data(), nullptr);
      },
      where);
  bool any_found = false;
  for (uint32_t g = 0; g < groups; ++g) any_found |= outcome.result[3 * g + 2] == 1;
  for (size_t g = 0; g < list.size(); ++g) {
    const double* row = &outcome.result[3 * list[g].group];
    double factor = row[1] * inv_scale;
    const bool zero = mode == NonFinite::kZero;
    if (mode == NonFinite::kSkip && any_found) factor = 1;
    expect(outcome.list[g].equals(scaled(list[g], factor, zero)), "elements after clipping", where);
    expect(row[1] == std::fmin(1, 1 / (row[0] + 1e-6) * max_norm) || std::isnan(row[1]), "coefficient",
           where);
  }
  expect(outcome.list.margins_are_intact(), "memory beside the gradients", where);
}

void check_scale_and_clamp(const List& list, const std::string& where) {
  std::vector<double> factors;
  for (size_t g = 0; g < list.size(); ++g) factors.push_back(g % 3 ? 0.25 + g : 1);
  const Outcome by_factors = run(
      list, 1,
      [&](const LaunchPlan&, Outcome& out) {
        std::vector<Item> items = out.list.items();
        for (size_t i = 0; i < items.size(); ++i) items[i].index = static_cast<uint32_t>(i);
        LaunchPlan(items, 1).scale({factors.data(), true, true}, true, nullptr);
      },
      where);
  const double limit = 0.75;
  const Outcome clamped =
      run(list, 1, [&](const LaunchPlan& plan, Outcome&) { plan.clamp(limit, nullptr); }, where);
  for (size_t g = 0; g < list.size(); ++g) {
    expect(by_factors.list[g].equals(scaled(list[g], factors[g], true)), "elements after scaling", where);
    expect(clamped.list[g].equals(clamped_to(list[g], limit)), "elements after limiting", where);
  }
  expect(by_factors.list.margins_are_intact() && clamped.list.margins_are_intact(),
         "memory beside the gradients", where);
}

// Exactly the same memory three times in the list is scaled three times.
void check_repeats(DType dtype) {
  const List list = List::normal(dtype, {kChunkBytes / 8 + 3});
  const double factor = 2;
  const Outcome outcome = run(
      list, 1,
      [&](const LaunchPlan&, Outcome& out) {
        const Item item = out.list.items()[0];
        std::vector<Item> items(3, item);
        items[1].repeat = 1;
        items[2].repeat = 2;
        LaunchPlan(items, 1).scale({&factor, true, false}, false, nullptr);
      },
      "repeats");
  expect(outcome.list[0].equals(scaled(list[0], 8, false)), "the same gradient three times", "repeats");
}

// Offsets beyond 2^32 bytes, without allocating that much.
void check_addresses() {
  TensorListMetadata metadata = {};
  char* base = reinterpret_cast<char*>(uint64_t{1} << 40);
  metadata.data[0] = metadata.data[1] = base + 6;
  metadata.first_chunk[1] = 7;
  metadata.last_end[1] = 100 | kBFloat16 << TensorListMetadata::kDTypeShift;
  metadata.count = 2;
  metadata.chunks = 7 + 3000000;
  for (uint32_t number : {7u, 8u, 70000u, 3000006u}) {
    const Chunk chunk = find_chunk(metadata, number);
    expect(chunk.data == base + uint64_t{number - 7} * kChunkBytes, "address of a chunk", "far away");
    expect(chunk.begin == (number == 7 ? 6 : 0), "beginning of a chunk", "far away");
    expect(chunk.end == (number == 3000006 ? 100 : kChunkBytes), "end of a chunk", "far away");
  }
}

void check_all(const List& list, const std::string& where) {
  for (Norm norm : {kNorm1, kNorm2, kNormInf}) {
    check_statistics(list, norm, false, where);
    if (!quick) check_statistics(list, norm, true, where);
  }
  for (NonFinite mode : {NonFinite::kPropagate, NonFinite::kZero, NonFinite::kSkip}) {
    check_clip(list, mode, 0.5, where);
    if (!quick) check_clip(list, mode, std::numeric_limits<double>::infinity(), where);
  }
  check_scale_and_clamp(list, where);
}

}  // namespace

int main(int count, char** arguments) {
  quick = count > 1 && std::string(arguments[1]) == "quick";
  check_addresses();
  for (DType dtype : {kFloat32, kBFloat16, kFloat16, kFloat64}) check_repeats(dtype);
  for (const auto& [name, list] : all_lists(quick)) {
    if (failures == 0) check_all(list, name);
  }
  std::printf("%lld checks, %lld failures\n", static_cast<long long>(checks),
              static_cast<long long>(failures));
  return failures > 0;
}
