// SPDX-License-Identifier: BSD-3-Clause
// Reductions over the threads of a warp and of a block, in a fixed order.

#pragma once

#include "elements.cuh"

namespace fastclip {
namespace cuda {

constexpr uint32_t kFullWarpMask = 0xffffffff;

// A shared-memory variable, and a kernel parameter that is read in place instead of copied to each thread.
// The tests, which run the kernels on a CPU, define them differently.
#ifndef FASTCLIP_SHARED
#define FASTCLIP_SHARED(Type, name) __shared__ Type name
#define FASTCLIP_PARAMETER(Type) const __grid_constant__ Type
#endif

// Adds power sums, or takes the larger of two magnitudes by their bits, which order NaN above Inf and Inf
// above every number.
template <Norm norm>
__device__ __forceinline__ double combine(double a, double b) {
  if (norm != kNormInf) return a + b;
  return to_bits(a) > to_bits(b) ? a : b;
}

// Statistics of a chunk, of a segment of a gradient, or of a gradient, which is a row of the result.
struct PartialStats {
  double value;  // sum of |x|^p, or the largest |x|
  double nan_count;
  double inf_count;
};

template <Norm norm>
__device__ __forceinline__ PartialStats combine(const PartialStats& a, const PartialStats& b) {
  return {combine<norm>(a.value, b.value), a.nan_count + b.nan_count, a.inf_count + b.inf_count};
}

// A butterfly reduction, after which all lanes hold the same bits.
template <Norm norm>
__device__ __forceinline__ double reduce_warp(double x) {
#pragma unroll
  for (int bit = kWarpSize / 2; bit > 0; bit /= 2)
    x = combine<norm>(x, __shfl_xor_sync(kFullWarpMask, x, bit));
  return x;
}

template <Norm norm>
__device__ __forceinline__ PartialStats reduce_warp(const PartialStats& stats) {
  return {reduce_warp<norm>(stats.value), reduce_warp<kNorm1>(stats.nan_count),
          reduce_warp<kNorm1>(stats.inf_count)};
}

// The shared memory of a block.
struct SharedMemory {
  Chunk chunk;  // kept here and not in registers, which are scarce while its elements are read
  double warp_value[kWarps];
  bool warp_nonzero[kWarps];
  PartialStats warp_stats[kWarps];
  bool last_block;
};

// All threads get the result. A barrier is needed before `warp_stats` is used again.
template <Norm norm>
__device__ __forceinline__ PartialStats reduce_block(const PartialStats& stats,
                                                     PartialStats (&warp_stats)[kWarps]) {
  const PartialStats warp_total = reduce_warp<norm>(stats);
  if (threadIdx.x % kWarpSize == 0) warp_stats[threadIdx.x / kWarpSize] = warp_total;
  __syncthreads();
  PartialStats total = warp_stats[0];
#pragma unroll 1
  for (int warp = 1; warp < kWarps; ++warp) total = combine<norm>(total, warp_stats[warp]);
  return total;
}

}  // namespace cuda
}  // namespace fastclip
