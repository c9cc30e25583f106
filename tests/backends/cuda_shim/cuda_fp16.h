// SPDX-License-Identifier: BSD-3-Clause
// Replaces NVIDIA's header of this name.

#pragma once

#include "cuda_runtime.h"

struct __half {
  _Float16 value;
};

inline __half __ushort_as_half(uint16_t bits) { return bit_cast_to<__half>(bits); }
inline uint16_t __half_as_ushort(__half x) { return bit_cast_to<uint16_t>(x); }
inline float __half2float(__half x) { return static_cast<float>(x.value); }
struct __half2 {
  __half x, y;
};
// Every NaN becomes the one that the conversion instruction returns.
inline __half __float2half_rn(float x) {
  return x != x ? __ushort_as_half(0x7fff) : __half{static_cast<_Float16>(x)};
}
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
