// SPDX-License-Identifier: BSD-3-Clause
// The gradients of one launch, handed over by value in the kernel's parameters: nothing is copied to the
// device beforehand, so that a launch can be captured in a CUDA graph.

#pragma once

#include "../common/types.h"
#include "tuning.cuh"

namespace fastclip {
namespace cuda {

constexpr int kVectorBytes = 16;

// Part of every result, as the order of summation depends on it. Each thread reads 16 vectors of a chunk, so
// that a float32 sum takes 16 additions, and two more where a chunk has elements outside whole vectors: the
// relative error of the sum is below 18 * 2^-24 even if every rounding goes the same way.
constexpr int kVectorsPerThread = 16;
constexpr int kChunkBytes = kThreads * kVectorsPerThread * kVectorBytes;

constexpr int kMaxTensors = 1600;

// A kernel's parameters may hold 32,764 bytes (from CUDA 12.1 and driver R530).
constexpr int kMaxParameterBytes = 32764;

// The index of a gradient that the scale pass leaves as it is.
constexpr uint32_t kLeftOut = 0xffffffff;

struct Table {
  char* data[kMaxTensors];
  uint32_t first_chunk[kMaxTensors];  // chunks of the gradients before this one
  uint32_t last_end[kMaxTensors];     // where the gradient ends in its last chunk, in bytes; its dtype
  uint32_t index[kMaxTensors];        // its factor, and its group
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

// The chunks of a gradient are cut at multiples of kChunkBytes from the aligned address at or before its
// first element, so that only its first and its last chunk can hold elements outside whole vectors.
struct Chunk {
  char* data;  // aligned to a vector; the elements lie in [begin, end)
  uint32_t begin;
  uint32_t end;
  uint32_t number;  // among the chunks of the launch
  uint32_t tensor;
  DType dtype;

  __device__ bool full() const { return begin == 0 && end == kChunkBytes; }
};

// The last gradient that begins at or before the chunk: gradients without elements begin where their
// successor does, and are passed over.
__device__ inline uint32_t tensor_of(const Table& table, uint32_t chunk) {
  uint32_t low = 0, high = table.count;
#pragma unroll 1
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (table.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ inline Chunk find_chunk(const Table& table, uint32_t number) {
  const uint32_t tensor = tensor_of(table, number);
  const uint32_t of_tensor = number - table.first_chunk[tensor];
  const uint64_t address = reinterpret_cast<uint64_t>(table.data[tensor]);
  const uint32_t head = address % kVectorBytes;
  Chunk found;
  found.data = reinterpret_cast<char*>(address - head + static_cast<uint64_t>(of_tensor) * kChunkBytes);
  found.begin = of_tensor == 0 ? head : 0;
  const bool last = number + 1 == table.end_chunk(tensor);
  found.end = last ? table.last_end[tensor] & ((1u << Table::kDTypeShift) - 1) : kChunkBytes;
  found.number = number;
  found.tensor = tensor;
  found.dtype = table.dtype(tensor);
  return found;
}

}  // namespace cuda
}  // namespace fastclip
