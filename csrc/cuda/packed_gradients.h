// SPDX-License-Identifier: BSD-3-Clause
// A list of gradients as the kernels take it: each gradient one contiguous run of memory.

#pragma once

#include <utility>
#include <vector>

#include "../common/gradients.h"
#include "launch.h"

namespace fastclip {
namespace cuda {

// Gradients whose memory has gaps, which autograd rarely produces, are packed into copies. unpack() copies
// them back, whether or not they were changed.
class PackedGradients {
 public:
  PackedGradients(std::vector<torch::stable::Tensor>& grads, Access access, const char* op);

  const GradientList& list() const { return list_; }

  // `index_of(i)` returns the index of the factor or group of gradient i.
  template <class IndexOf>
  std::vector<Item> items(const IndexOf& index_of) const {
    std::vector<Item> items;
    items.reserve(list_.items.size());
    for (int64_t i = 0; i < list_.size(); ++i) {
      const Gradient& grad = list_.items[i];
      items.push_back({grad.data, grad.numel, grad.dtype, static_cast<uint32_t>(index_of(i)), 0});
    }
    number_repeats(&items);
    return items;
  }

  void unpack();

 private:
  void number_repeats(std::vector<Item>* items) const;

  std::vector<torch::stable::Tensor>& grads_;
  GradientList list_;
  std::vector<std::pair<int64_t, torch::stable::Tensor>> copies_;
};

}  // namespace cuda
}  // namespace fastclip
