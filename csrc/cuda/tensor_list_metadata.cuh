// SPDX-License-Identifier: BSD-3-Clause
// The gradients of one launch, passed by value in the kernel's parameters: nothing is copied to the device
// beforehand, so that a launch can be captured in a CUDA graph.

#pragma once

#include "../common/types.h"
#include "tuning.cuh"

namespace fastclip {
namespace cuda {

constexpr int kVectorBytes = 16;

// Changing this changes the order of summation and so the last bits of every norm. Each thread reads 16
// vectors of a chunk, so that a float32 sum takes 16 additions, and two more where a chunk has elements
// outside whole vectors: its relative error is below 18 * 2^-24 even if every rounding goes the same way.
constexpr int kVectorsPerThread = 16;
constexpr int kChunkBytes = kThreads * kVectorsPerThread * kVectorBytes;

constexpr int kMaxTensors = 1600;

// The limit of CUDA for the parameters of a kernel (from CUDA 12.1 and driver R530).
constexpr int kMaxParameterBytes = 32764;

// The index of a gradient that this launch must not write.
constexpr uint32_t kSkipTensor = 0xffffffff;

struct TensorListMetadata {
  char* data[kMaxTensors];
  uint32_t first_chunk[kMaxTensors];  // number of chunks of all earlier gradients
  uint32_t last_end[kMaxTensors];     // bits 0-27: end of its last chunk, in bytes; above: its dtype
  uint32_t index[kMaxTensors];        // index of its factor or group
  uint32_t count;
  uint32_t chunks;

  static constexpr int kDTypeShift = 28;

  FASTCLIP_HOST_DEVICE uint32_t end_chunk(uint32_t tensor) const {
    return tensor + 1 < count ? first_chunk[tensor + 1] : chunks;
  }
  FASTCLIP_HOST_DEVICE DType dtype(uint32_t tensor) const {
    return static_cast<DType>(last_end[tensor] >> kDTypeShift);
  }
};

// A gradient is split at multiples of kChunkBytes from the last aligned address at or before its first
// element, so that only its first and its last chunk can hold elements outside whole vectors.
struct Chunk {
  char* data;  // aligned to a vector; the elements are the bytes [begin, end)
  uint32_t begin;
  uint32_t end;
  uint32_t number;  // index among the chunks of the launch
  uint32_t tensor;
  DType dtype;

  __device__ bool full() const { return begin == 0 && end == kChunkBytes; }
};

// Returns the last gradient whose first chunk is at or before `chunk`. Empty gradients share their first
// chunk with their successor and are never found.
__device__ inline uint32_t find_tensor(const TensorListMetadata& metadata, uint32_t chunk) {
  uint32_t low = 0, high = metadata.count;
#pragma unroll 1
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (metadata.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ inline Chunk find_chunk(const TensorListMetadata& metadata, uint32_t number) {
  const uint32_t tensor = find_tensor(metadata, number);
  const uint32_t chunk_in_tensor = number - metadata.first_chunk[tensor];
  const uint64_t address = reinterpret_cast<uint64_t>(metadata.data[tensor]);
  const uint32_t head = address % kVectorBytes;
  Chunk found;
  found.data = reinterpret_cast<char*>(address - head + static_cast<uint64_t>(chunk_in_tensor) * kChunkBytes);
  found.begin = chunk_in_tensor == 0 ? head : 0;
  const bool last = number + 1 == metadata.end_chunk(tensor);
  found.end = last ? metadata.last_end[tensor] & ((1u << TensorListMetadata::kDTypeShift) - 1) : kChunkBytes;
  found.number = number;
  found.tensor = tensor;
  found.dtype = metadata.dtype(tensor);
  return found;
}

}  // namespace cuda
}  // namespace fastclip
