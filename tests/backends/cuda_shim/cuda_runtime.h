// SPDX-License-Identifier: BSD-3-Clause
// Replaces NVIDIA's header of this name, so that the kernels compile as plain C++ and run on a CPU. It holds
// only what csrc/cuda uses.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "scheduler.h"

#define __host__
#define __device__
#define __global__ inline
#define __forceinline__ inline
#define __launch_bounds__(...)

// Parameters are shared by all threads, as on a GPU, and not copied for each.
#define FASTCLIP_PARAMETER(Type) const Type&
#define FASTCLIP_SHARED(Type, name) Type& name = fastclip_shim::block_memory<Type>()

// threadIdx.x and the like, read from the running thread.
template <uint32_t fastclip_shim::Thread::* number>
struct ThreadNumber {
  struct {
    operator uint32_t() const { return fastclip_shim::self().*number; }
  } x;
};
inline const ThreadNumber<&fastclip_shim::Thread::thread_index> threadIdx = {};
inline const ThreadNumber<&fastclip_shim::Thread::block_index> blockIdx = {};
inline const ThreadNumber<&fastclip_shim::Thread::grid_size> gridDim = {};

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

template <class To, class From>
inline To bit_cast_to(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

#define __builtin_assume(condition)
inline bool __isGlobal(const void*) { return true; }

inline uint32_t __float_as_uint(float x) { return bit_cast_to<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return bit_cast_to<float>(x); }
inline long long __double_as_longlong(double x) { return bit_cast_to<long long>(x); }
inline double __longlong_as_double(long long x) { return bit_cast_to<double>(x); }

template <class T>
inline T __ldcg(const T* p) {
  return *p;
}
template <class T>
inline T __ldg(const T* p) {
  return *p;
}
template <class T>
inline T __ldcs(const T* p) {
  return *p;
}
template <class T>
inline void __stcs(T* p, T value) {
  *p = value;
}

inline uint32_t atomicAdd(uint32_t* p, uint32_t x) { return fastclip_shim::add(p, x); }
inline uint32_t atomicExch(uint32_t* p, uint32_t x) { return __atomic_exchange_n(p, x, __ATOMIC_RELAXED); }
inline void __threadfence() { fastclip_shim::fence(); }
inline void __syncthreads() { fastclip_shim::self().block->barrier.wait(); }
inline void __syncwarp() { fastclip_shim::warp().barrier.wait(); }
inline int __syncthreads_or(int vote) {
  fastclip_shim::Block& block = *fastclip_shim::self().block;
  return fastclip_shim::any(block.barrier, block.votes, fastclip_shim::self().thread_index, vote);
}
// Every lane must be in the mask: the kernels call these with whole warps only.
inline void require_lane(uint32_t mask) {
  if (mask >> fastclip_shim::lane() & 1) return;
  std::fprintf(stderr, "FAILED: lane %d is not in the mask %08x\n", fastclip_shim::lane(), mask);
  std::abort();
}
inline int __any_sync(uint32_t mask, int vote) {
  require_lane(mask);
  fastclip_shim::Warp& warp = fastclip_shim::warp();
  return fastclip_shim::any(warp.barrier, warp.votes, fastclip_shim::lane(), vote);
}
template <class T>
inline T __shfl_sync(uint32_t mask, T x, int lane) {
  require_lane(mask);
  return fastclip_shim::exchange(x, lane);
}
template <class T>
inline T __shfl_xor_sync(uint32_t mask, T x, int bits) {
  require_lane(mask);
  return fastclip_shim::exchange(x, fastclip_shim::lane() ^ bits);
}

// Functions of the CUDA runtime.
typedef void* cudaStream_t;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
struct dim3 {
  uint32_t x;
  dim3(uint32_t size = 1) : x(size) {}
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};
inline const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }
// One device per size of the grid, since the number of resident blocks is cached per device.
inline cudaError_t cudaGetDevice(int* device) {
  return *device = fastclip_shim::settings().blocks, cudaSuccess;
}
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = fastclip_shim::settings().blocks, cudaSuccess;
}
template <class Kernel>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t size, cudaStream_t) {
  return std::memset(p, value, size), cudaSuccess;
}
template <class... Parameters, class... Arguments>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                                      const Arguments&... arguments) {
  if (config->gridDim.x == 0) return cudaErrorInvalidValue;
  fastclip_shim::run(config->gridDim.x, config->blockDim.x, [&] { kernel(arguments...); });
  return cudaSuccess;
}
