// SPDX-License-Identifier: BSD-3-Clause

#include "packed_gradients.h"

#include <torch/csrc/stable/ops.h>

namespace fastclip {
namespace cuda {
namespace {

using torch::stable::Tensor;

// Kernels count gradients and groups in 32 bits.
constexpr int64_t kMaxGradients = int64_t{1} << 31;

void require_aligned(const GradientList& list, const char* op) {
  for (int64_t i = 0; i < list.size(); ++i) {
    const Gradient& grad = list.items[i];
    if (grad.numel > 0 && reinterpret_cast<uintptr_t>(grad.data) % grad.item_size() != 0) {
      fail(op,
           "expected gradients at addresses that are multiples of their element size, but that of grads[" +
               std::to_string(i) + "] is not");
    }
  }
}

}  // namespace

PackedGradients::PackedGradients(std::vector<Tensor>& grads, Access access, const char* op)
    : grads_(grads), list_(collect(grads, access, op)) {
  if (list_.size() >= kMaxGradients) fail(op, "expected fewer than 2^31 gradients");
  require_aligned(list_, op);
  for (int64_t i = 0; i < list_.size(); ++i) {
    Gradient& grad = list_.items[i];
    if (grad.strides < 0) continue;
    const bool repeats = access == Access::kWrite && list_.is_repeat[i];
    if (!repeats) {
      Tensor copy = torch::stable::new_empty(grads[i], grads[i].sizes());
      torch::stable::copy_(copy, grads[i]);
      copies_.emplace_back(i, copy);
      grad.data = static_cast<char*>(copy.mutable_data_ptr());
    }
    // Gradients with the same memory share its copy.
    for (int32_t same = i; access == Access::kWrite && same >= 0; same = list_.next_same[same]) {
      list_.items[same].data = grad.data;
    }
  }
}

void PackedGradients::unpack() {
  for (auto& [index, copy] : copies_) torch::stable::copy_(grads_[index], copy);
}

void PackedGradients::number_repeats(std::vector<Item>* items) const {
  if (list_.next_same.empty()) return;  // read only
  for (int64_t i = 0; i < list_.size(); ++i) {
    if (list_.is_repeat[i]) continue;
    uint32_t repeat = 0;
    for (int32_t same = i; same >= 0; same = list_.next_same[same]) (*items)[same].repeat = repeat++;
  }
}

}  // namespace cuda
}  // namespace fastclip
