// SPDX-License-Identifier: BSD-3-Clause
// The CUDA implementations of the ops. Nothing here synchronizes with the device.

#include <fastclip_device.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "packed_gradients.h"

namespace fastclip {
namespace cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const Tensor& first_of(const std::vector<Tensor>& grads, const char* op) {
  if (grads.empty()) fail(op, "expected at least one gradient");
  return grads[0];
}

Tensor empty_beside(const Tensor& grad, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::empty(sizes, dtype, std::nullopt, grad.device());
}

ScalarType result_dtype(const GradientList& list) {
  return list.any_float64() ? ScalarType::Double : ScalarType::Float;
}

// Checks a float32 or float64 tensor of 1 or `count` elements on the device of the gradients.
DeviceScalars to_scalars(const Tensor& tensor, const Tensor& grad, int64_t count, const char* op,
                         const char* name) {
  const bool float64 = tensor.scalar_type() == ScalarType::Double;
  const bool here = tensor.is_cpu() == grad.is_cpu() && tensor.get_device_index() == grad.get_device_index();
  if (!here || !tensor.is_contiguous() || (!float64 && tensor.scalar_type() != ScalarType::Float)) {
    fail(op, std::string("expected ") + name +
                 " to be a contiguous float32 or float64 tensor on the device of the gradients");
  }
  const int64_t numel = tensor.numel();
  require_count(numel, count, op, name);
  return {tensor.const_data_ptr(), float64, numel > 1};
}

// The results of the statistics kernel; `workspace` is the input of LaunchPlan::apply_clip().
struct Outcome {
  Tensor result;
  Tensor stats;
  Tensor workspace;
};

Outcome compute_statistics(const LaunchPlan& plan, const PackedGradients& grads, const Tensor& grad,
                           Norm norm, StatisticsOptions options, int64_t columns, void* stream) {
  const ScalarType dtype = result_dtype(grads.list());
  const int64_t groups = options.num_groups;
  Outcome outcome = {
      columns == 1 ? empty_beside(grad, {groups}, dtype) : empty_beside(grad, {groups, columns}, dtype),
      empty_beside(grad, {grads.list().size(), 3}, ScalarType::Double),
      empty_beside(grad, {static_cast<int64_t>(plan.workspace_bytes())}, ScalarType::Byte)};
  options.float64 = dtype == ScalarType::Double;
  options.result = outcome.result.mutable_data_ptr();
  plan.statistics(norm, options, static_cast<double*>(outcome.stats.mutable_data_ptr()),
                  outcome.workspace.mutable_data_ptr(), stream);
  return outcome;
}

std::tuple<Tensor, Tensor> grad_stats(std::vector<Tensor> grads, double norm_type, bool finite_only,
                                      std::vector<int64_t> groups) {
  constexpr const char* op = "grad_stats";
  const Norm norm = parse_norm(norm_type, op);
  const DeviceScope device(first_of(grads, op));
  const PackedGradients packed(grads, Access::kRead, op);
  const Groups grouping(groups, packed.list().size(), op);
  StatisticsOptions options = {};
  options.num_groups = static_cast<uint32_t>(grouping.count());
  options.groups_sorted = grouping.sorted();
  options.finite_only = finite_only;
  const LaunchPlan plan(packed.items([&](int64_t i) { return grouping.of(i); }), options.num_groups);
  Outcome outcome = compute_statistics(plan, packed, grads[0], norm, options, 1, device.stream());
  return {outcome.result, outcome.stats};
}

void scale_(std::vector<Tensor> grads, Tensor scale, bool zero_nonfinite) {
  constexpr const char* op = "scale_";
  const DeviceScope device(first_of(grads, op));
  PackedGradients packed(grads, Access::kWrite, op);
  const DeviceScalars factors = to_scalars(scale, grads[0], packed.list().size(), op, "scale");
  LaunchPlan(packed.items([](int64_t i) { return i; }), 1).scale(factors, zero_nonfinite, device.stream());
  packed.unpack();
}

std::tuple<Tensor, Tensor> clip_(std::vector<Tensor> grads, double max_norm, double norm_type,
                                 std::string nonfinite, std::vector<int64_t> groups,
                                 std::optional<Tensor> max_norm_tensor, std::optional<Tensor> inv_scale) {
  constexpr const char* op = "clip_";
  const Norm norm = parse_norm(norm_type, op);
  StatisticsOptions options = {};
  options.nonfinite = parse_nonfinite(nonfinite, op);
  const DeviceScope device(first_of(grads, op));
  PackedGradients packed(grads, Access::kWrite, op);
  const Groups grouping(groups, packed.list().size(), op);
  options.num_groups = static_cast<uint32_t>(grouping.count());
  options.groups_sorted = grouping.sorted();
  options.finite_only = options.nonfinite == NonFinite::kZero;
  options.clip = true;
  options.max_norm = max_norm;
  if (max_norm_tensor) {
    options.max_norms = to_scalars(*max_norm_tensor, grads[0], grouping.count(), op, "max_norm");
  }
  if (inv_scale) options.inv_scale = to_scalars(*inv_scale, grads[0], 1, op, "inv_scale");

  const LaunchPlan plan(packed.items([&](int64_t i) { return grouping.of(i); }), options.num_groups);
  Outcome outcome = compute_statistics(plan, packed, grads[0], norm, options, 3, device.stream());
  plan.apply_clip(options.finite_only, outcome.workspace.mutable_data_ptr(), device.stream());
  packed.unpack();
  return {outcome.result, outcome.stats};
}

void clamp_(std::vector<Tensor> grads, double limit) {
  constexpr const char* op = "clamp_";
  require_limit(limit, op);
  const DeviceScope device(first_of(grads, op));
  PackedGradients packed(grads, Access::kWrite, op);
  LaunchPlan(packed.items([](int64_t) { return 0; }), 1).clamp(limit, device.stream());
  packed.unpack();
}

}  // namespace
}  // namespace cuda
}  // namespace fastclip

FASTCLIP_KERNELS(m) {
  m.impl("grad_stats", TORCH_BOX(&fastclip::cuda::grad_stats));
  m.impl("scale_", TORCH_BOX(&fastclip::cuda::scale_));
  m.impl("clip_", TORCH_BOX(&fastclip::cuda::clip_));
  m.impl("clamp_", TORCH_BOX(&fastclip::cuda::clamp_));
}
