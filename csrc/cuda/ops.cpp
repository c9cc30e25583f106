// SPDX-License-Identifier: BSD-3-Clause
// The CUDA implementations of the ops. Nothing here waits for the device.

#include <fastclip_device.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "packed.h"

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

// A small float32 or float64 tensor on the gradients' device, of which there must be one of two numbers.
DeviceNumbers to_numbers(const Tensor& tensor, const Tensor& grad, int64_t one, int64_t other, const char* op,
                         const char* name) {
  const bool float64 = tensor.scalar_type() == ScalarType::Double;
  const bool here = tensor.is_cpu() == grad.is_cpu() && tensor.get_device_index() == grad.get_device_index();
  if (!here || !tensor.is_contiguous() || (!float64 && tensor.scalar_type() != ScalarType::Float)) {
    fail(op, std::string("expected ") + name +
                 " to be a contiguous float32 or float64 tensor on the device of the gradients");
  }
  const int64_t numel = tensor.numel();
  if (numel != one && numel != other) {
    fail(op, std::string("expected ") + name + " to have " + std::to_string(one) + " or " +
                 std::to_string(other) + " elements, but got " + std::to_string(numel));
  }
  return {tensor.const_data_ptr(), float64, numel > 1};
}

// The statistics of a call and what a scale pass after it needs.
struct Outcome {
  Tensor result;
  Tensor stats;
  Tensor workspace;
};

Outcome compute_statistics(const Pass& pass, const PackedGradients& grads, const Tensor& grad, Norm norm,
                           Request request, int64_t columns, void* stream) {
  const ScalarType dtype = result_dtype(grads.list());
  const int64_t groups = request.num_groups;
  Outcome outcome = {
      columns == 1 ? empty_beside(grad, {groups}, dtype) : empty_beside(grad, {groups, columns}, dtype),
      empty_beside(grad, {grads.list().size(), 3}, ScalarType::Double),
      empty_beside(grad, {static_cast<int64_t>(pass.workspace_bytes())}, ScalarType::Byte)};
  request.float64 = dtype == ScalarType::Double;
  request.result = outcome.result.mutable_data_ptr();
  pass.statistics(norm, request, static_cast<double*>(outcome.stats.mutable_data_ptr()),
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
  Request request = {};
  request.num_groups = static_cast<uint32_t>(grouping.count());
  request.groups_sorted = grouping.sorted();
  request.finite_only = finite_only;
  const Pass pass(packed.items([&](int64_t i) { return grouping.of(i); }), request.num_groups);
  Outcome outcome = compute_statistics(pass, packed, grads[0], norm, request, 1, device.stream());
  return {outcome.result, outcome.stats};
}

void scale_(std::vector<Tensor> grads, Tensor scale, bool zero_nonfinite) {
  constexpr const char* op = "scale_";
  const DeviceScope device(first_of(grads, op));
  PackedGradients packed(grads, Access::kWrite, op);
  const DeviceNumbers factors = to_numbers(scale, grads[0], 1, packed.list().size(), op, "scale");
  Pass(packed.items([](int64_t i) { return i; }), 1).scale(factors, zero_nonfinite, device.stream());
  packed.unpack();
}

std::tuple<Tensor, Tensor> clip_(std::vector<Tensor> grads, double max_norm, double norm_type,
                                 std::string nonfinite, std::vector<int64_t> groups,
                                 std::optional<Tensor> max_norm_tensor, std::optional<Tensor> inv_scale) {
  constexpr const char* op = "clip_";
  const Norm norm = parse_norm(norm_type, op);
  Request request = {};
  request.nonfinite = parse_nonfinite(nonfinite, op);
  const DeviceScope device(first_of(grads, op));
  PackedGradients packed(grads, Access::kWrite, op);
  const Groups grouping(groups, packed.list().size(), op);
  request.num_groups = static_cast<uint32_t>(grouping.count());
  request.groups_sorted = grouping.sorted();
  request.finite_only = request.nonfinite == NonFinite::kZero;
  request.clip = true;
  request.max_norm = max_norm;
  if (max_norm_tensor) {
    request.max_norms = to_numbers(*max_norm_tensor, grads[0], 1, grouping.count(), op, "max_norm");
  }
  if (inv_scale) request.inv_scale = to_numbers(*inv_scale, grads[0], 1, 1, op, "inv_scale");

  const Pass pass(packed.items([&](int64_t i) { return grouping.of(i); }), request.num_groups);
  Outcome outcome = compute_statistics(pass, packed, grads[0], norm, request, 3, device.stream());
  pass.scale_as_decided(request.finite_only, outcome.workspace.mutable_data_ptr(), device.stream());
  packed.unpack();
  return {outcome.result, outcome.stats};
}

void clamp_(std::vector<Tensor> grads, double limit) {
  constexpr const char* op = "clamp_";
  require_limit(limit, op);
  const DeviceScope device(first_of(grads, op));
  PackedGradients packed(grads, Access::kWrite, op);
  Pass(packed.items([](int64_t) { return 0; }), 1).clamp(limit, device.stream());
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
