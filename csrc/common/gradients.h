// SPDX-License-Identifier: BSD-3-Clause
// A list of gradients as raw memory, checked before anything is read or written.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "arguments.h"

namespace fastclip {

// Dimensions of a gradient whose memory has gaps, outermost first, sizes above 1 only.
struct Strides {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // in elements
};

struct Gradient {
  char* data;
  int64_t numel;
  DType dtype;
  int32_t strides;  // index into GradientList::strides, or -1 where the memory has no gaps

  int64_t item_size() const { return fastclip::item_size(dtype); }
};

struct GradientList {
  std::vector<Gradient> items;
  std::vector<Strides> strides;
  // For gradients that are written: the next gradient with the very same memory, or -1; and whether an
  // earlier one has it. Such a gradient is handled by the first of them, once for each.
  std::vector<int32_t> next_same;
  std::vector<bool> is_repeat;

  int64_t size() const { return static_cast<int64_t>(items.size()); }
  bool any_float64() const;
  const Strides* strides_of(const Gradient& grad) const {
    return grad.strides < 0 ? nullptr : &strides[grad.strides];
  }
};

enum class Access { kRead, kWrite };

// Throws std::runtime_error for a gradient on another device than the first or of another dtype than the
// four, and, if they are to be written, for gradients that overlap in part or in themselves.
GradientList collect(const std::vector<torch::stable::Tensor>& tensors, Access access, const char* op);

// Overlap of memory, in overlap.cpp.
bool overlaps_itself(const Strides& strides);
void find_overlaps(GradientList& list, const char* op);

}  // namespace fastclip
