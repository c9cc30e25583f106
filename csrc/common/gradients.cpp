// SPDX-License-Identifier: BSD-3-Clause

#include "gradients.h"

#include <algorithm>

namespace fastclip {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

bool to_dtype(ScalarType type, DType* dtype) {
  switch (type) {
    case ScalarType::Float: *dtype = kFloat32; return true;
    case ScalarType::BFloat16: *dtype = kBFloat16; return true;
    case ScalarType::Half: *dtype = kFloat16; return true;
    case ScalarType::Double: *dtype = kFloat64; return true;
    default: return false;
  }
}

// Returns -1 for the CPU.
int32_t device_of(const Tensor& tensor) { return tensor.is_cpu() ? -1 : tensor.get_device_index(); }

std::string name_of(int64_t index) { return "grads[" + std::to_string(index) + "]"; }

// Returns the dimensions ordered from the largest stride to the smallest, merged where they are contiguous.
Strides sorted_strides(const Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::stable_sort(dims.begin(), dims.end(), [](auto& a, auto& b) { return a.first > b.first; });
  Strides result;
  for (const auto& [stride, size] : dims) {
    const bool joins_outer = !result.sizes.empty() && result.strides.back() == stride * size;
    if (joins_outer) {
      result.sizes.back() *= size;
      result.strides.back() = stride;
    } else {
      result.sizes.push_back(size);
      result.strides.push_back(stride);
    }
  }
  return result;
}

bool is_dense(const Strides& strides) {
  return strides.sizes.empty() || (strides.sizes.size() == 1 && strides.strides[0] == 1);
}

}  // namespace

bool GradientList::any_float64() const {
  return std::any_of(items.begin(), items.end(), [](const Gradient& g) { return g.dtype == kFloat64; });
}

GradientList collect(const std::vector<Tensor>& tensors, Access access, const char* op) {
  GradientList list;
  list.items.reserve(tensors.size());
  const int32_t device = tensors.empty() ? -1 : device_of(tensors[0]);
  for (const Tensor& tensor : tensors) {
    const int64_t index = list.size();
    Gradient grad{};
    if (device_of(tensor) != device) {
      fail(op, "expected gradients on one device, but " + name_of(index) +
                   " is on a different device than grads[0]");
    }
    if (!to_dtype(tensor.scalar_type(), &grad.dtype)) {
      fail(op, "expected float32, bfloat16, float16 or float64 gradients, but " + name_of(index) +
                   " has another dtype");
    }
    grad.numel = tensor.numel();
    grad.strides = -1;
    if (!tensor.is_contiguous() && grad.numel > 0) {
      Strides strides = sorted_strides(tensor);
      if (!is_dense(strides)) {
        if (access == Access::kWrite && overlaps_itself(strides)) {
          fail(op, "expected gradients that do not overlap, but " + name_of(index) +
                       " overlaps itself (an expanded tensor?)");
        }
        grad.strides = static_cast<int32_t>(list.strides.size());
        list.strides.push_back(std::move(strides));
      }
    }
    const void* data = access == Access::kWrite ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
    grad.data = static_cast<char*>(const_cast<void*>(data));
    list.items.push_back(grad);
  }
  if (access == Access::kWrite) find_overlaps(list, op);
  return list;
}

}  // namespace fastclip
