// SPDX-License-Identifier: BSD-3-Clause
// The inner loops over one contiguous run of elements, and the table through which they are called.
//
// Each instruction set has a translation unit of its own that includes nothing but <cstdint>, types.h and
// <immintrin.h>: a template of the standard library instantiated there could be the copy that the linker
// keeps for the whole library, and would then run on a CPU that lacks the instructions.

#pragma once

#include "../common/types.h"

namespace fastclip {

// What one run of elements adds to the statistics of its gradient.
struct Partial {
  double value;  // sum of |x|^p, or the largest |x| for norm_type inf
  int64_t nan_count;
  int64_t inf_count;
};

// All variants of a loop give the same bits: element i always goes to lane i % 32, lanes are summed in
// one order, and no multiplication is contracted with an addition. Only which NaN a product is depends on
// the processor, where Inf meets the factor 0 or a NaN meets a NaN factor.
struct Loops {
  const char* name;
  // With finite_only, non-finite elements are counted but left out of `value`.
  void (*reduce[kNumDTypes][kNumNorms])(const void* data, int64_t size, bool finite_only, Partial* out);
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
