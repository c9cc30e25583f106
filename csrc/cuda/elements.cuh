// SPDX-License-Identifier: BSD-3-Clause
// Access to elements of each dtype within vectors of 16 bytes.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tensor_list_metadata.cuh"

namespace fastclip {
namespace cuda {

constexpr uint32_t kAbs32 = 0x7fffffff;
constexpr uint32_t kInf32 = 0x7f800000;
constexpr uint64_t kAbs64 = 0x7fffffffffffffff;
constexpr uint64_t kInf64 = 0x7ff0000000000000;
constexpr uint64_t kNaN64 = 0x7ff8000000000000;
constexpr uint64_t kSign64 = 0x8000000000000000;

__device__ __forceinline__ double from_bits(uint64_t bits) {
  return __longlong_as_double(static_cast<long long>(bits));
}
__device__ __forceinline__ uint64_t to_bits(double x) {
  return static_cast<uint64_t>(__double_as_longlong(x));
}

struct Vector {
  uint32_t word[4];

  Vector() = default;
  __device__ explicit Vector(uint4 v) : word{v.x, v.y, v.z, v.w} {}
  __device__ uint4 packed() const { return {word[0], word[1], word[2], word[3]}; }
};

// Each type defines: Element, the type in memory; Real, the type for arithmetic; get and set for an element
// of a vector; from and to for a single element in memory; for 2-byte types pack, which makes a word of two
// elements; kAbsWord, the mask that clears the signs in a word.
struct Float32 {
  using Element = float;
  using Real = float;
  static constexpr uint32_t kAbsWord = kAbs32;
  __device__ static float get(const Vector& v, int i) { return __uint_as_float(v.word[i]); }
  __device__ static void set(Vector& v, int i, float x) { v.word[i] = __float_as_uint(x); }
  __device__ static float from(float x) { return x; }
  __device__ static float to(float x) { return x; }
};

struct BFloat16 {
  using Element = uint16_t;
  using Real = float;
  static constexpr uint32_t kAbsWord = 0x7fff7fff;
  __device__ static float get(const Vector& v, int i) {
    const uint32_t word = v.word[i / 2];
    return __uint_as_float(i % 2 ? word & 0xffff0000 : word << 16);
  }
  __device__ static void set(Vector& v, int i, float x) {
    uint32_t& word = v.word[i / 2];
    const uint32_t bits = to(x);
    word = i % 2 ? (word & 0xffff) | bits << 16 : (word & 0xffff0000) | bits;
  }
  __device__ static float from(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
  __device__ static uint16_t to(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
  __device__ static uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return __bfloat16_as_ushort(pair.x) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
  }
};

struct Float16 {
  using Element = uint16_t;
  using Real = float;
  static constexpr uint32_t kAbsWord = 0x7fff7fff;
  __device__ static float get(const Vector& v, int i) {
    return from(static_cast<uint16_t>(i % 2 ? v.word[i / 2] >> 16 : v.word[i / 2]));
  }
  __device__ static void set(Vector& v, int i, float x) {
    uint32_t& word = v.word[i / 2];
    const uint32_t bits = to(x);
    word = i % 2 ? (word & 0xffff) | bits << 16 : (word & 0xffff0000) | bits;
  }
  __device__ static float from(uint16_t x) { return __half2float(__ushort_as_half(x)); }
  __device__ static uint16_t to(float x) { return __half_as_ushort(__float2half_rn(x)); }
  __device__ static uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return __half_as_ushort(pair.x) | static_cast<uint32_t>(__half_as_ushort(pair.y)) << 16;
  }
};

struct Float64 {
  using Element = double;
  using Real = double;
  static constexpr uint32_t kAbsWord = 0xffffffff;
  __device__ static double get(const Vector& v, int i) {
    return from_bits(static_cast<uint64_t>(v.word[2 * i + 1]) << 32 | v.word[2 * i]);
  }
  __device__ static void set(Vector& v, int i, double x) {
    v.word[2 * i] = static_cast<uint32_t>(to_bits(x));
    v.word[2 * i + 1] = static_cast<uint32_t>(to_bits(x) >> 32);
  }
  __device__ static double from(double x) { return x; }
  __device__ static double to(double x) { return x; }
};

template <class Type>
constexpr int kElements = kVectorBytes / sizeof(typename Type::Element);

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & kAbs32) < kInf32; }
__device__ __forceinline__ bool is_finite(double x) { return (to_bits(x) & kAbs64) < kInf64; }
__device__ __forceinline__ bool is_nan(float x) { return (__float_as_uint(x) & kAbs32) > kInf32; }
__device__ __forceinline__ bool is_nan(double x) { return (to_bits(x) & kAbs64) > kInf64; }

// Calls use(element) for the elements of a chunk outside whole vectors: at most one at each end per thread.
template <class Type, class Use>
__device__ __forceinline__ void for_head_and_tail(const Chunk& chunk, Use use) {
  using Element = typename Type::Element;
  const uint32_t first_vector = (chunk.begin + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  const uint32_t last_vector = chunk.end / kVectorBytes * kVectorBytes;
  const uint32_t head_end = first_vector < chunk.end ? first_vector : chunk.end;
  const uint32_t head = chunk.begin + threadIdx.x * sizeof(Element);
  if (head < head_end) use(reinterpret_cast<Element*>(chunk.data + head));
  if (last_vector < first_vector) return;  // no whole vector: all elements belong to the head
  const uint32_t tail = last_vector + threadIdx.x * sizeof(Element);
  if (tail < chunk.end) use(reinterpret_cast<Element*>(chunk.data + tail));
}

// Calls use(vector) for the whole vectors of a chunk that is not full.
template <class Use>
__device__ __forceinline__ void for_vectors(const Chunk& chunk, Use use) {
  const uint32_t first = (chunk.begin + kVectorBytes - 1) / kVectorBytes;
  uint4* vectors = reinterpret_cast<uint4*>(chunk.data);
#pragma unroll 1
  for (uint32_t v = first + threadIdx.x; v < chunk.end / kVectorBytes; v += kThreads) use(vectors + v);
}

// Calls use(Type{}) with the type of a dtype.
template <class Use>
__device__ __forceinline__ void dispatch(DType dtype, Use use) {
  switch (dtype) {
    case kFloat32: use(Float32{}); break;
    case kBFloat16: use(BFloat16{}); break;
    case kFloat16: use(Float16{}); break;
    default: use(Float64{});
  }
}

}  // namespace cuda
}  // namespace fastclip
