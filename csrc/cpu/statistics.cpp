// SPDX-License-Identifier: BSD-3-Clause

#include "statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "capability.h"

namespace fastclip {
namespace {

// Sums, or the larger of two where a NaN wins.
void add(const Partial& part, Norm norm, Partial* total) {
  if (norm == kNormInf) {
    if (!(part.value <= total->value)) total->value = std::isnan(total->value) ? total->value : part.value;
  } else {
    total->value += part.value;
  }
  total->nan_count += part.nan_count;
  total->inf_count += part.inf_count;
}

}  // namespace

Groups::Groups(const std::vector<int64_t>& groups, int64_t num_grads, const char* op) : groups_(groups) {
  if (groups.empty()) return;
  if (static_cast<int64_t>(groups.size()) != num_grads) {
    fail(op, "expected a group for each of the " + std::to_string(num_grads) + " gradients, but got " +
                 std::to_string(groups.size()));
  }
  for (int64_t group : groups) {
    if (group < 0 || group >= num_grads) {
      fail(op, "expected groups numbered from 0 to at most " + std::to_string(num_grads - 1) + ", but got " +
                   std::to_string(group));
    }
    count_ = std::max(count_, group + 1);
  }
}

Norm parse_norm(double norm_type, const char* op) {
  if (norm_type == 2) return kNorm2;
  if (norm_type == 1) return kNorm1;
  if (norm_type == std::numeric_limits<double>::infinity()) return kNormInf;
  fail(op, "expected norm_type 1, 2 or inf, but got " + std::to_string(norm_type));
}

Statistics compute_statistics(const GradientList& list, const ChunkTable& table, const Groups& groups,
                              Norm norm, bool finite_only) {
  Statistics statistics;
  statistics.chunks.resize(table.size());
  const Loops& loops = select_loops();
  table.for_each(Order::kForward, [&](int64_t i) {
    const Chunk& chunk = table[i];
    const auto reduce = loops.reduce[list.items[chunk.grad].dtype][norm];
    with_elements(list, chunk, Access::kRead,
                  [&](const void* data) { reduce(data, chunk.size, finite_only, &statistics.chunks[i]); });
  });
  statistics.grads.resize(list.size());
  for (int64_t i = 0; i < table.size(); ++i) {
    add(statistics.chunks[i], norm, &statistics.grads[table[i].grad]);
  }
  std::vector<Partial> sums(groups.count());
  for (int64_t g = 0; g < list.size(); ++g) add(statistics.grads[g], norm, &sums[groups.of(g)]);
  for (const Partial& sum : sums) {
    statistics.totals.push_back(norm == kNorm2 ? std::sqrt(sum.value) : sum.value);
  }
  return statistics;
}

template <class Real>
GroupSummary summarize(double total, double max_norm, bool max_norm_is_tensor, double inv_scale,
                       bool found_nonfinite) {
  const Real total_norm = static_cast<Real>(total * inv_scale);
  const Real limit = static_cast<Real>(max_norm);
  const Real padded = total_norm + static_cast<Real>(1e-6);
  Real coef = max_norm_is_tensor ? limit / padded : Real{1} / padded * limit;
  if (coef > 1) coef = 1;  // keeps NaN
  const bool usable = !found_nonfinite && std::isfinite(total_norm) && coef >= 0;
  return {total_norm, coef, !usable};
}

template GroupSummary summarize<float>(double, double, bool, double, bool);
template GroupSummary summarize<double>(double, double, bool, double, bool);

}  // namespace fastclip
