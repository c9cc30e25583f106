// SPDX-License-Identifier: BSD-3-Clause
// The statistics of one chunk, computed by all threads of a block.

#pragma once

#include <type_traits>

#include "block_reduce.cuh"

namespace fastclip {
namespace cuda {

// A sum of squares below this may have lost a relevant part to underflow in float32: a chunk has at most 2^15
// terms, each of which loses less than 2^-126; together they lose less than 2^-24 of this sum.
constexpr double kTinySum = 0x1p-87;
static_assert(kChunkBytes / 2 <= 1 << 15, "kTinySum holds for chunks of up to 2^15 elements");

// Squares of float16 do not underflow (the smallest is 2^-48), and float64 is summed in float64.
template <class Type, Norm norm>
constexpr bool kMayUnderflow =
    norm == kNorm2 && (std::is_same<Type, Float32>::value || std::is_same<Type, BFloat16>::value);

template <Norm norm>
__device__ __forceinline__ float add_power(float sum, float x) {
  return norm == kNorm2 ? fmaf(x, x, sum) : sum + fabsf(x);
}
template <Norm norm>
__device__ __forceinline__ double add_power(double sum, double x) {
  return norm == kNorm2 ? fma(x, x, sum) : sum + fabs(x);
}

// What one thread accumulates of a chunk for p = 1 and 2: one sum for each position in a vector, and the OR
// of all bits, which distinguishes zeros from values whose squares underflowed to zero.
template <class Type, Norm norm>
struct Accumulator {
  using Real = typename Type::Real;
  Real sum[kElements<Type>] = {};
  uint32_t seen = 0;

  __device__ __forceinline__ void add(const Vector& v) {
#pragma unroll
    for (int i = 0; i < kElements<Type>; ++i) sum[i] = add_power<norm>(sum[i], Type::get(v, i));
    if (kMayUnderflow<Type, norm>) {
#pragma unroll
      for (int w = 0; w < 4; ++w) seen |= v.word[w];
    }
  }
  __device__ __forceinline__ void add(typename Type::Element element) {
    const Real x = Type::from(element);
    sum[0] = add_power<norm>(sum[0], x);
    if (kMayUnderflow<Type, norm> && x != 0) seen |= 1;
  }
  // Eight float32 sums become four in float32 first: one more addition, but half the conversions.
  __device__ __forceinline__ double value() const {
    constexpr int kSums = kElements<Type> < 4 ? kElements<Type> : 4;
    double total = 0;
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      total += i + 4 < kElements<Type> ? sum[i] + sum[(i + 4) % kElements<Type>] : sum[i];
    return total;
  }
  __device__ __forceinline__ bool nonzero() const { return (seen & Type::kAbsWord) != 0; }
};

// For p = inf: the largest magnitude, compared by its bits.
template <class Type>
struct Accumulator<Type, kNormInf> {
  using Element = typename Type::Element;
  using Bits = typename std::conditional<sizeof(Element) == 8, uint64_t, uint32_t>::type;
  Bits largest = 0;

  __device__ __forceinline__ void take(Bits magnitude) {
    largest = magnitude > largest ? magnitude : largest;
  }
  __device__ __forceinline__ void add(const Vector& v) {
#pragma unroll
    for (int i = 0; i < 4; i += sizeof(Element) == 8 ? 2 : 1) {
      if (sizeof(Element) == 8) {
        take(to_bits(Float64::get(v, i / 2)) & kAbs64);
      } else if (sizeof(Element) == 4) {
        take(v.word[i] & kAbs32);
      } else {
        take(v.word[i] & 0x7fff);
        take(v.word[i] >> 16 & 0x7fff);
      }
    }
  }
  __device__ __forceinline__ void add(float x) { take(__float_as_uint(x) & kAbs32); }
  __device__ __forceinline__ void add(double x) { take(to_bits(x) & kAbs64); }
  __device__ __forceinline__ void add(uint16_t bits) { take(bits & 0x7fff); }
  __device__ __forceinline__ double value() const {
    if (sizeof(Element) == 8) return from_bits(largest);
    if (sizeof(Element) == 4) return widen(__uint_as_float(static_cast<uint32_t>(largest)));
    return widen(static_cast<float>(Type::from(static_cast<Element>(largest))));
  }
  // The sign of a converted NaN is unspecified; it must not affect the comparison of bits.
  __device__ static double widen(float x) { return from_bits(to_bits(static_cast<double>(x)) & kAbs64); }
  __device__ __forceinline__ bool nonzero() const { return false; }
};

template <class Type, Norm norm>
__device__ __forceinline__ Accumulator<Type, norm> accumulate_chunk(const Chunk& chunk) {
  Accumulator<Type, norm> accumulator;
  if (chunk.full()) {
    const uint4* vectors = reinterpret_cast<const uint4*>(chunk.data);
#pragma unroll 1
    for (uint32_t v = threadIdx.x; v < kVectorsPerThread * kThreads; v += kLoadsInFlight * kThreads) {
      uint4 loaded[kLoadsInFlight];
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) loaded[i] = load_to_read(vectors + v + i * kThreads);
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) accumulator.add(Vector(loaded[i]));
    }
  } else {
    for_vectors(chunk, [&](const uint4* p) { accumulator.add(Vector(load_to_read(p))); });
    for_head_and_tail<Type>(chunk,
                            [&](const typename Type::Element* p) { accumulator.add(load_to_read(p)); });
  }
  return accumulator;
}

// Reads a chunk again whose fast sum is not reliable: counts NaN and Inf, and sums in float64.
template <class Type, Norm norm>
__device__ inline PartialStats reduce_exact(const Chunk& chunk, PartialStats (&warp_stats)[kWarps]) {
  double value = 0;
  uint32_t nan_count = 0, inf_count = 0;
  const auto take = [&](typename Type::Real x) {
    const double finite = is_finite(x) ? x : 0;
    value = norm == kNormInf ? combine<norm>(value, fabs(finite)) : add_power<norm>(value, finite);
    nan_count += is_nan(x);
    inf_count += !is_finite(x) && !is_nan(x);
  };
  for_vectors(chunk, [&](const uint4* p) {
    const Vector v(load_to_read(p));
#pragma unroll
    for (int i = 0; i < kElements<Type>; ++i) take(Type::get(v, i));
  });
  for_head_and_tail<Type>(chunk, [&](const typename Type::Element* p) { take(Type::from(load_to_read(p))); });
  return reduce_block<norm>({value, static_cast<double>(nan_count), static_cast<double>(inf_count)},
                            warp_stats);
}

// Returns the value of a chunk: NaN or Inf if it holds one and `finite_only` is false, else that of its
// finite elements.
__device__ __forceinline__ double propagate_nonfinite(const PartialStats& stats, bool finite_only) {
  if (finite_only || stats.nan_count + stats.inf_count == 0) return stats.value;
  return from_bits(stats.nan_count > 0 ? kNaN64 : kInf64);
}

// All threads of the block get the statistics of the chunk; the chunk itself is left in `shared`.
template <class Type, Norm norm>
__device__ __forceinline__ PartialStats reduce_chunk(const Chunk& chunk, bool finite_only,
                                                     SharedMemory& shared) {
  if (threadIdx.x == 0) shared.chunk = chunk;
  const Accumulator<Type, norm> accumulator = accumulate_chunk<Type, norm>(chunk);
  const double warp_total = reduce_warp<norm>(accumulator.value());
  const bool nonzero = kMayUnderflow<Type, norm> && __any_sync(kFullWarpMask, accumulator.nonzero());
  if (threadIdx.x % kWarpSize == 0) {
    shared.warp_value[threadIdx.x / kWarpSize] = warp_total;
    shared.warp_nonzero[threadIdx.x / kWarpSize] = nonzero;
  }
  __syncthreads();
  double total = 0;
  bool any = false;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    total = combine<norm>(total, shared.warp_value[warp]);
    any |= shared.warp_nonzero[warp];
  }
  const bool tiny = kMayUnderflow<Type, norm> && total < kTinySum && any;
  if (is_finite(total) && !tiny) return {total, 0, 0};
  PartialStats stats = reduce_exact<Type, norm>(shared.chunk, shared.warp_stats);
  stats.value = propagate_nonfinite(stats, finite_only);
  return stats;
}

}  // namespace cuda
}  // namespace fastclip
