// SPDX-License-Identifier: BSD-3-Clause
// The CPU implementations of the ops.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "../common/clip_summary.h"
#include "capability.h"
#include "statistics.h"

namespace fastclip {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor empty_cpu(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::empty(sizes, dtype, std::nullopt,
                              torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

// Returns a new tensor of the dtype of this list's norms: float64 if any gradient is float64, else float32.
Tensor to_result(const std::vector<double>& values, std::initializer_list<int64_t> sizes, bool float64) {
  Tensor tensor = empty_cpu(sizes, float64 ? ScalarType::Double : ScalarType::Float);
  if (float64) {
    std::copy(values.begin(), values.end(), static_cast<double*>(tensor.mutable_data_ptr()));
  } else {
    std::transform(values.begin(), values.end(), static_cast<float*>(tensor.mutable_data_ptr()),
                   [](double x) { return static_cast<float>(x); });
  }
  return tensor;
}

Tensor to_stats(const std::vector<PartialStats>& grads) {
  Tensor tensor = empty_cpu({static_cast<int64_t>(grads.size()), 3}, ScalarType::Double);
  double* row = static_cast<double*>(tensor.mutable_data_ptr());
  for (const PartialStats& grad : grads) {
    *row++ = grad.value;
    *row++ = static_cast<double>(grad.nan_count);
    *row++ = static_cast<double>(grad.inf_count);
  }
  return tensor;
}

// Returns the elements of a float32 or float64 tensor of 1 or `count` elements.
std::vector<double> to_scalars(const Tensor& tensor, int64_t count, const char* op, const char* name) {
  const int64_t numel = tensor.numel();
  const bool float64 = tensor.scalar_type() == ScalarType::Double;
  if (!tensor.is_cpu() || !tensor.is_contiguous() ||
      (!float64 && tensor.scalar_type() != ScalarType::Float)) {
    fail(op, std::string("expected ") + name + " to be a contiguous float32 or float64 tensor on the CPU");
  }
  require_count(numel, count, op, name);
  if (float64) {
    const double* data = static_cast<const double*>(tensor.const_data_ptr());
    return std::vector<double>(data, data + numel);
  }
  const float* data = static_cast<const float*>(tensor.const_data_ptr());
  return std::vector<double>(data, data + numel);
}

// Scales the chunks whose factor is not 1 or that hold elements to be zeroed; the others are not even read.
// `may_zero(i)` returns whether chunk i may hold non-finite elements.
template <class Factor, class MayZero>
void scale_chunks(const GradientList& list, const ChunkTable& table, bool zero_nonfinite, Factor factor_of,
                  MayZero may_zero) {
  const Loops& loops = select_loops();
  table.for_each(Order::kBackward, [&](int64_t i) {
    const Chunk& chunk = table[i];
    if (list.is_repeat[chunk.grad]) return;
    const auto scale = loops.scale[list.items[chunk.grad].dtype];
    for (int32_t same = chunk.grad; same >= 0; same = list.next_same[same]) {
      const double factor = factor_of(same);
      const bool zero = zero_nonfinite && may_zero(i);
      if (factor == 1 && !zero) continue;
      with_elements(list, chunk, Access::kWrite, [&](void* data) { scale(data, chunk.size, factor, zero); });
    }
  });
}

std::tuple<Tensor, Tensor> grad_stats(std::vector<Tensor> grads, double norm_type, bool finite_only,
                                      std::vector<int64_t> groups) {
  constexpr const char* op = "grad_stats";
  const Norm norm = parse_norm(norm_type, op);
  const GradientList list = collect(grads, Access::kRead, op);
  const Groups grouping(groups, list.size(), op);
  const Statistics statistics = compute_statistics(list, ChunkTable(list), grouping, norm, finite_only);
  return {to_result(statistics.totals, {grouping.count()}, list.any_float64()), to_stats(statistics.grads)};
}

void scale_(std::vector<Tensor> grads, Tensor scale, bool zero_nonfinite) {
  constexpr const char* op = "scale_";
  const GradientList list = collect(grads, Access::kWrite, op);
  const std::vector<double> factors = to_scalars(scale, list.size(), op, "scale");
  const auto factor_of = [&](int32_t grad) { return factors.size() == 1 ? factors[0] : factors[grad]; };
  scale_chunks(list, ChunkTable(list), zero_nonfinite, factor_of, [](int64_t) { return true; });
}

std::vector<ClipSummary> summarize_groups(const Statistics& statistics, const Groups& groups,
                                          const std::vector<double>& max_norms, bool max_norm_is_tensor,
                                          double inv_scale, bool float64) {
  std::vector<bool> nonfinite(groups.count());
  for (size_t g = 0; g < statistics.grads.size(); ++g) {
    const PartialStats& grad = statistics.grads[g];
    if (grad.nan_count + grad.inf_count > 0) nonfinite[groups.of(g)] = true;
  }
  std::vector<ClipSummary> summaries;
  for (int64_t g = 0; g < groups.count(); ++g) {
    const MaxNorm max_norm = {max_norms.size() == 1 ? max_norms[0] : max_norms[g], max_norm_is_tensor};
    const auto summarize_one = float64 ? summarize<double> : summarize<float>;
    summaries.push_back(summarize_one(statistics.totals[g], max_norm, inv_scale, nonfinite[g]));
  }
  return summaries;
}

std::tuple<Tensor, Tensor> clip_(std::vector<Tensor> grads, double max_norm, double norm_type,
                                 std::string nonfinite, std::vector<int64_t> groups,
                                 std::optional<Tensor> max_norm_tensor, std::optional<Tensor> inv_scale) {
  constexpr const char* op = "clip_";
  const Norm norm = parse_norm(norm_type, op);
  const NonFinite mode = parse_nonfinite(nonfinite, op);
  const GradientList list = collect(grads, Access::kWrite, op);
  const Groups grouping(groups, list.size(), op);
  const double unscale = inv_scale ? to_scalars(*inv_scale, 1, op, "inv_scale")[0] : 1.0;
  const std::vector<double> max_norms = max_norm_tensor
                                            ? to_scalars(*max_norm_tensor, grouping.count(), op, "max_norm")
                                            : std::vector<double>{max_norm};

  const ChunkTable table(list);
  const bool float64 = list.any_float64();
  const Statistics statistics = compute_statistics(list, table, grouping, norm, mode == NonFinite::kZero);
  const std::vector<ClipSummary> summaries =
      summarize_groups(statistics, grouping, max_norms, max_norm_tensor.has_value(), unscale, float64);

  std::vector<double> factors, rows;
  bool any_found_inf = false, any_factor = false;
  for (const ClipSummary& group : summaries) {
    factors.push_back(group.factor);
    rows.insert(rows.end(), {group.total_norm, group.clip_coef, group.found_inf ? 1.0 : 0.0});
    any_found_inf |= group.found_inf;
    any_factor |= factors.back() != 1;
  }
  const bool zero = mode == NonFinite::kZero && any_found_inf;
  if (!(mode == NonFinite::kSkip && any_found_inf) && (any_factor || zero)) {
    scale_chunks(
        list, table, zero, [&](int32_t grad) { return factors[grouping.of(grad)]; },
        [&](int64_t i) { return statistics.chunks[i].nan_count + statistics.chunks[i].inf_count > 0; });
  }
  return {to_result(rows, {grouping.count(), 3}, float64), to_stats(statistics.grads)};
}

void clamp_(std::vector<Tensor> grads, double limit) {
  constexpr const char* op = "clamp_";
  require_limit(limit, op);
  const GradientList list = collect(grads, Access::kWrite, op);
  const ChunkTable table(list);
  const Loops& loops = select_loops();
  table.for_each(Order::kForward, [&](int64_t i) {
    const Chunk& chunk = table[i];
    if (list.is_repeat[chunk.grad]) return;  // clamping is idempotent
    const auto clamp = loops.clamp[list.items[chunk.grad].dtype];
    with_elements(list, chunk, Access::kWrite, [&](void* data) { clamp(data, chunk.size, limit); });
  });
}

}  // namespace
}  // namespace fastclip

STABLE_TORCH_LIBRARY_IMPL(fastclip, CPU, m) {
  m.impl("grad_stats", TORCH_BOX(&fastclip::grad_stats));
  m.impl("scale_", TORCH_BOX(&fastclip::scale_));
  m.impl("clip_", TORCH_BOX(&fastclip::clip_));
  m.impl("clamp_", TORCH_BOX(&fastclip::clamp_));
}
