// SPDX-License-Identifier: BSD-3-Clause
// Replaces NVIDIA's header of this name.

#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
};

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
// Rounds to nearest, ties to even; every NaN becomes the one that the conversion instruction returns.
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t bits = __float_as_uint(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>(x != x ? 0x7fff : rounded)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
