// SPDX-License-Identifier: BSD-3-Clause
// In-place updates of one chunk by all threads of a block: scaling and clamping.

#pragma once

#include "finalize.cuh"

namespace fastclip {
namespace cuda {

// A select, never a multiplication by 0: 0 * inf is NaN.
template <class Real, bool zero_nonfinite>
struct Scale {
  // Half as many loads in flight where the registers do not suffice for more.
  static constexpr int kLoads = zero_nonfinite || sizeof(Real) == 8 ? kLoadsInFlight / 2 : kLoadsInFlight;

  Real factor;

  static constexpr bool kWritesAll = true;
  __device__ __forceinline__ bool writes(Real) const { return true; }
  __device__ __forceinline__ Real operator()(Real x) const {
    return zero_nonfinite && !is_finite(x) ? Real{0} : x * factor;
  }
};

// As in torch: raise to -limit, then lower to limit, so that a negative limit becomes the value of all
// elements. NaN compares false and stays.
template <class Real>
struct Clamp {
  static constexpr int kLoads = kLoadsInFlight / 2;

  Real limit;

  static constexpr bool kWritesAll = false;
  __device__ __forceinline__ bool writes(Real x) const { return fabs(x) > limit; }
  __device__ __forceinline__ Real operator()(Real x) const { return x > limit ? limit : -fabs(limit); }
};

template <class Type, class Change>
__device__ __forceinline__ Vector change_all(const Vector& v, const Change& change) {
  Vector changed;
#pragma unroll
  for (int i = 0; i < kElements<Type>; i += sizeof(typename Type::Element) == 2 ? 2 : 1) {
    if constexpr (sizeof(typename Type::Element) == 2) {
      changed.word[i / 2] = Type::pack(change(Type::get(v, i)), change(Type::get(v, i + 1)));
    } else {
      Type::set(changed, i, change(Type::get(v, i)));
    }
  }
  return changed;
}

// Writes a vector only if one of its elements changes; the other elements keep their bits.
template <class Type, class Change>
__device__ __forceinline__ void update_vector(uint4* p, uint4 loaded, const Change& change) {
  Vector v(loaded);
  if constexpr (Change::kWritesAll) {
    store_update(p, change_all<Type>(v, change).packed());
  } else {
    bool writes = false;
#pragma unroll
    for (int i = 0; i < kElements<Type>; ++i) writes |= change.writes(Type::get(v, i));
    if (!writes) return;
#pragma unroll
    for (int i = 0; i < kElements<Type>; ++i) {
      const auto x = Type::get(v, i);
      if (change.writes(x)) Type::set(v, i, change(x));
    }
    store_update(p, v.packed());
  }
}

template <class Type, class Change>
__device__ __forceinline__ void update_chunk(const Chunk& chunk, const Change& change) {
  if (chunk.full()) {
    uint4* vectors = reinterpret_cast<uint4*>(chunk.data) + threadIdx.x;
#pragma unroll 1
    for (int turn = 0; turn < kVectorsPerThread / Change::kLoads; ++turn) {
      uint4 loaded[Change::kLoads];
#pragma unroll
      for (int i = 0; i < Change::kLoads; ++i) loaded[i] = load_to_update(vectors + i * kThreads);
#pragma unroll
      for (int i = 0; i < Change::kLoads; ++i) update_vector<Type>(vectors + i * kThreads, loaded[i], change);
      vectors += Change::kLoads * kThreads;
    }
  } else {
    for_vectors(chunk, [&](uint4* p) { update_vector<Type>(p, load_to_update(p), change); });
    for_head_and_tail<Type>(chunk, [&](typename Type::Element* p) {
      const auto x = Type::from(load_to_update(p));
      if (change.writes(x)) store_update(p, Type::to(change(x)));
    });
  }
}

}  // namespace cuda
}  // namespace fastclip
