// SPDX-License-Identifier: BSD-3-Clause
// Reductions over the threads of a warp and of a block, each in one fixed order.

#pragma once

#include "elements.cuh"

namespace fastclip {
namespace cuda {

constexpr uint32_t kAllLanes = 0xffffffff;

// A variable that all threads of a block share, and a parameter that stays where the driver put it. The
// tests, which run blocks on a CPU, define them differently.
#ifndef FASTCLIP_SHARED
#define FASTCLIP_SHARED(Type, name) __shared__ Type name
#define FASTCLIP_PARAMETER(Type) const __grid_constant__ Type
#endif

// Power sums are added. Of two magnitudes the larger in the order of the bits counts, in which NaN comes
// above Inf and Inf above every number.
template <Norm norm>
__device__ __forceinline__ double join(double a, double b) {
  if (norm != kNormInf) return a + b;
  return to_bits(a) > to_bits(b) ? a : b;
}

// What was found in a chunk, a part of a gradient, or a gradient: a row of the statistics.
struct Row {
  double value;  // sum of |x|^p, or the largest |x|
  double nan_count;
  double inf_count;
};

template <Norm norm>
__device__ __forceinline__ Row join(const Row& a, const Row& b) {
  return {join<norm>(a.value, b.value), a.nan_count + b.nan_count, a.inf_count + b.inf_count};
}

// Each lane joins with the one whose number differs in one bit, so that all end with the same bits.
template <Norm norm>
__device__ __forceinline__ double reduce_warp(double x) {
#pragma unroll
  for (int bit = kWarp / 2; bit > 0; bit /= 2) x = join<norm>(x, __shfl_xor_sync(kAllLanes, x, bit));
  return x;
}

template <Norm norm>
__device__ __forceinline__ Row reduce_warp(const Row& row) {
  return {reduce_warp<norm>(row.value), reduce_warp<kNorm1>(row.nan_count),
          reduce_warp<kNorm1>(row.inf_count)};
}

// What the threads of a block tell each other.
struct Shared {
  Chunk chunk;  // would cost registers while its elements are read
  double value[kWarps];
  bool nonzero[kWarps];
  Row rows[kWarps];
  bool last_block;
};

// All threads get the result. A barrier must pass before `rows` is used again.
template <Norm norm>
__device__ __forceinline__ Row reduce_block(const Row& row, Row (&rows)[kWarps]) {
  const Row of_warp = reduce_warp<norm>(row);
  if (threadIdx.x % kWarp == 0) rows[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  Row total = rows[0];
#pragma unroll 1
  for (int warp = 1; warp < kWarps; ++warp) total = join<norm>(total, rows[warp]);
  return total;
}

}  // namespace cuda
}  // namespace fastclip
