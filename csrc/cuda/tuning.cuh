// SPDX-License-Identifier: BSD-3-Clause
// Everything that may be tuned on a GPU without changing what the kernels compute, in one place. Each value
// can be set from the compiler's command line, so that one run can measure several builds.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastclip {
namespace cuda {

// Threads of a block. Changes the order of summation, and so the last bits of a norm.
#ifndef FASTCLIP_THREADS
#define FASTCLIP_THREADS 256
#endif
constexpr int kThreads = FASTCLIP_THREADS;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

// Loads of 16 bytes that a thread has in flight at once.
#ifndef FASTCLIP_LOADS_IN_FLIGHT
#define FASTCLIP_LOADS_IN_FLIGHT 4
#endif
constexpr int kLoadsInFlight = FASTCLIP_LOADS_IN_FLIGHT;

// Threads that a multiprocessor can hold; registers are limited so that it does.
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

// Whether the scale pass goes from the last chunk to the first: what the statistics pass read last is then
// found in the L2 cache.
#ifndef FASTCLIP_SCALE_BACKWARDS
#define FASTCLIP_SCALE_BACKWARDS 1
#endif
constexpr bool kScaleBackwards = FASTCLIP_SCALE_BACKWARDS;

// How the L2 cache treats a line: 0 as it sees fit, 1 as one that is not needed again soon. The statistics
// pass leaves lines for the scale pass, and the scale pass those for the optimizer.
#ifndef FASTCLIP_STATISTICS_STREAM
#define FASTCLIP_STATISTICS_STREAM 0
#endif
#ifndef FASTCLIP_UPDATE_STREAM
#define FASTCLIP_UPDATE_STREAM 0
#endif

// An address out of a table could be of any memory. That it is global memory saves a test in every access.
template <class T>
__device__ __forceinline__ T* global(T* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

// Of a load of 16 bytes whose halves are used as float64 the compiler for sm_100 and sm_120 makes two, unless
// it must believe that the words were changed in between, or reads by __ldg.
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
