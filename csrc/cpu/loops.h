// SPDX-License-Identifier: BSD-3-Clause
// The inner loops over one contiguous run of elements, and the table through which they are called.
//
// Each instruction set has its own translation unit, which includes only <cstdint>, types.h and
// <immintrin.h>: the linker could keep its instance of a standard library template for the whole library,
// which would then crash on a CPU without those instructions.

#pragma once

#include "../common/types.h"

namespace fastclip {

// Statistics of a chunk, of a gradient, or of a group.
struct PartialStats {
  double value;  // sum of |x|^p, or the largest |x| for norm_type inf
  int64_t nan_count;
  int64_t inf_count;
};

// All variants of a loop give the same bits: element i always goes to lane i % 32, lanes are summed in a
// fixed order, and no multiplication is contracted with an addition. Only the bits of a NaN that a product
// creates (Inf times 0, or NaN times NaN) depend on the processor.
struct Loops {
  const char* name;
  // With finite_only, non-finite elements are counted but do not enter `value`.
  void (*reduce[kNumDTypes][kNumNorms])(const void* data, int64_t size, bool finite_only, PartialStats* out);
  // With zero_nonfinite, non-finite elements become 0, whatever the factor.
  void (*scale[kNumDTypes])(void* data, int64_t size, double factor, bool zero_nonfinite);
  void (*clamp[kNumDTypes])(void* data, int64_t size, double limit);
};

extern const Loops kBaselineLoops;
#if defined(__x86_64__)
extern const Loops kAvx2Loops;
extern const Loops kAvx512Loops;
#endif

}  // namespace fastclip
