// SPDX-License-Identifier: BSD-3-Clause
// All constants that may be tuned for a GPU without changing what the kernels compute. Each can be set on the
// compiler's command line, so that one benchmark run can compare several builds.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastclip {
namespace cuda {

// Threads per block. Changes the order of summation and so the last bits of a norm.
#ifndef FASTCLIP_THREADS
#define FASTCLIP_THREADS 256
#endif
constexpr int kThreads = FASTCLIP_THREADS;
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;

// Loads of 16 bytes that a thread keeps in flight.
#ifndef FASTCLIP_LOADS_IN_FLIGHT
#define FASTCLIP_LOADS_IN_FLIGHT 4
#endif
constexpr int kLoadsInFlight = FASTCLIP_LOADS_IN_FLIGHT;

// Threads that a multiprocessor can hold; __launch_bounds__ limits registers so that it does.
#if !defined(__CUDA_ARCH__)
constexpr int kResidentThreads = 2048;
#elif __CUDA_ARCH__ == 750
constexpr int kResidentThreads = 1024;
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int kResidentThreads = 1536;
#else
constexpr int kResidentThreads = 2048;
#endif
constexpr int kResidentBlocks = kResidentThreads / kThreads;

// Whether the scale kernel goes from the last chunk to the first, so that it finds in the L2 cache what the
// statistics kernel read last.
#ifndef FASTCLIP_SCALE_BACKWARDS
#define FASTCLIP_SCALE_BACKWARDS 1
#endif
constexpr bool kScaleBackwards = FASTCLIP_SCALE_BACKWARDS;

// The L2 cache policy: 0 the default, 1 evict first. By default the statistics kernel leaves lines in the
// cache for the scale kernel, and the scale kernel for the optimizer.
#ifndef FASTCLIP_STATISTICS_STREAM
#define FASTCLIP_STATISTICS_STREAM 0
#endif
#ifndef FASTCLIP_UPDATE_STREAM
#define FASTCLIP_UPDATE_STREAM 0
#endif

// Pointers from the metadata are generic. Knowing that they point to global memory saves a test per access.
template <class T>
__device__ __forceinline__ T* global(T* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

// For sm_100 and sm_120 the compiler splits a 16-byte load whose halves are used as float64 in two, unless it
// must assume that the words changed in between, or reads through __ldg.
__device__ __forceinline__ uint4 keep_whole(uint4 v) {
  asm("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
  return v;
}
template <class T>
__device__ __forceinline__ T keep_whole(T x) {
  return x;
}

template <class T>
__device__ __forceinline__ T load_to_read(const T* p) {
  return FASTCLIP_STATISTICS_STREAM ? __ldcs(p) : __ldg(p);
}

template <class T>
__device__ __forceinline__ T load_to_update(const T* p) {
  return FASTCLIP_UPDATE_STREAM ? __ldcs(p) : keep_whole(*global(p));
}

template <class T>
__device__ __forceinline__ void store_update(T* p, T value) {
  if (FASTCLIP_UPDATE_STREAM) {
    __stcs(p, value);
  } else {
    *global(p) = value;
  }
}

}  // namespace cuda
}  // namespace fastclip
