// SPDX-License-Identifier: BSD-3-Clause
// What changes a chunk in place, by all threads of a block.

#pragma once

#include "finish.cuh"

namespace fastclip {
namespace cuda {

// A select, never a multiplication by 0: 0 * inf is NaN.
template <class Real>
struct Scale {
  Real factor;
  bool zero_nonfinite;

  __device__ __forceinline__ bool writes(Real) const { return true; }
  __device__ __forceinline__ Real operator()(Real x) const {
    return zero_nonfinite && !is_finite(x) ? Real{0} : x * factor;
  }
};

// What torch does: raise to -limit, then lower to limit. A negative limit then is the value of all elements.
// NaN compares false and stays.
template <class Real>
struct Clamp {
  Real limit;

  __device__ __forceinline__ bool writes(Real x) const { return fabs(x) > limit; }
  __device__ __forceinline__ Real operator()(Real x) const { return x > limit ? limit : -fabs(limit); }
};

// Writes a vector only if the change writes one of its elements. The others keep their bits.
template <class Type, class Change>
__device__ __forceinline__ void update_vector(uint4* p, uint4 loaded, const Change& change) {
  Vector v(loaded);
  bool writes = false;
#pragma unroll
  for (int i = 0; i < kElements<Type>; ++i) {
    const auto x = Type::get(v, i);
    if (!change.writes(x)) continue;
    writes = true;
    Type::set(v, i, change(x));
  }
  if (writes) store_update(p, v.packed());
}

template <class Type, class Change>
__device__ __forceinline__ void update_chunk(const Chunk& chunk, const Change& change) {
  if (chunk.full()) {
    uint4* vectors = reinterpret_cast<uint4*>(chunk.data) + threadIdx.x;
#pragma unroll 1
    for (int turn = 0; turn < kVectorsPerThread / kLoadsInFlight; ++turn) {
      uint4 loaded[kLoadsInFlight];
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) loaded[i] = load_to_update(vectors + i * kThreads);
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) update_vector<Type>(vectors + i * kThreads, loaded[i], change);
      vectors += kLoadsInFlight * kThreads;
    }
  } else {
    for_vectors(chunk, [&](uint4* p) { update_vector<Type>(p, load_to_update(p), change); });
    for_loose_elements<Type>(chunk, [&](typename Type::Element* p) {
      const auto x = Type::from(load_to_update(p));
      if (change.writes(x)) store_update(p, Type::to(change(x)));
    });
  }
}

}  // namespace cuda
}  // namespace fastclip
