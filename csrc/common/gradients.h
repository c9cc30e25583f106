// SPDX-License-Identifier: BSD-3-Clause
// A list of gradients as raw memory. All checks run before anything is read or written.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "arguments.h"

namespace fastclip {

// The layout of a gradient whose memory has gaps: its dimensions of size > 1, outermost first.
struct Strides {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // in elements
};

struct Gradient {
  char* data;
  int64_t numel;
  DType dtype;
  int32_t strides;  // index into GradientList::strides; -1 if the memory has no gaps

  int64_t item_size() const { return fastclip::item_size(dtype); }
};

struct GradientList {
  std::vector<Gradient> items;
  std::vector<Strides> strides;
  // For lists that are written: the next gradient with exactly the same memory, or -1; and whether an earlier
  // gradient has the same memory. The first of such gradients is processed once for each of them.
  std::vector<int32_t> next_same;
  std::vector<bool> is_repeat;

  int64_t size() const { return static_cast<int64_t>(items.size()); }
  bool any_float64() const;
  const Strides* strides_of(const Gradient& grad) const {
    return grad.strides < 0 ? nullptr : &strides[grad.strides];
  }
};

enum class Access { kRead, kWrite };

// Throws std::runtime_error for a gradient that is not on the device of the first or whose dtype is not
// supported and, with Access::kWrite, for gradients that overlap themselves or overlap partly.
GradientList collect(const std::vector<torch::stable::Tensor>& tensors, Access access, const char* op);

// Defined in overlap.cpp.
bool overlaps_itself(const Strides& strides);
void find_overlaps(GradientList& list, const char* op);

}  // namespace fastclip
