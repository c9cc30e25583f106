// SPDX-License-Identifier: BSD-3-Clause
// The types shared by all parts of the library. Must include nothing but <cstdint>; see cpu/loops.h.

#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FASTCLIP_HOST_DEVICE __host__ __device__
#else
#define FASTCLIP_HOST_DEVICE
#endif

namespace fastclip {

enum DType : int { kFloat32, kBFloat16, kFloat16, kFloat64, kNumDTypes };
enum Norm : int { kNorm1, kNorm2, kNormInf, kNumNorms };

// The handling of gradients that hold NaN or Inf; see docs/drop_in.md, "NaN and Inf".
enum class NonFinite { kPropagate, kZero, kSkip };

FASTCLIP_HOST_DEVICE constexpr int item_size(DType dtype) {
  return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2;
}

}  // namespace fastclip
