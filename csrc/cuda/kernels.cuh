// SPDX-License-Identifier: BSD-3-Clause
// The kernels. Blocks loop over the chunks with the stride of the grid; results do not depend on the grid
// size.

#pragma once

#include "update.cuh"

namespace fastclip {
namespace cuda {

template <Norm norm>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    statistics_kernel(FASTCLIP_PARAMETER(TensorListMetadata) metadata,
                      FASTCLIP_PARAMETER(StatisticsArguments) arguments) {
  FASTCLIP_SHARED(SharedMemory, shared);
  for (uint32_t number = blockIdx.x; number < metadata.chunks;) {
    const Chunk chunk = find_chunk(metadata, number);
    PartialStats stats;
    dispatch(chunk.dtype, [&](auto type) {
      stats = reduce_chunk<decltype(type), norm>(chunk, arguments.options.finite_only, shared);
    });
    number = shared.chunk.number;
    const uint32_t tensor = shared.chunk.tensor;
    __syncthreads();  // before the other warps overwrite `shared` with the next chunk
    if (threadIdx.x < kWarpSize) store_partial<norm>(metadata, arguments.workspace, number, tensor, stats);
    number += gridDim.x;
  }
  if (!is_last_block(arguments.workspace, shared)) return;
  write_stats<norm>(metadata, arguments);
  if (!arguments.last_launch) return;
  __syncthreads();
  finalize<norm>(arguments, shared);
}

struct ScaleArguments {
  const uint32_t* scale_needed;  // null: always scale
  DeviceScalars factors;
  const double* partials;  // mark which chunks hold NaN or Inf; null: look in all of them
  bool zero_nonfinite;
};

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    scale_kernel(FASTCLIP_PARAMETER(TensorListMetadata) metadata,
                 FASTCLIP_PARAMETER(ScaleArguments) arguments) {
  if (arguments.scale_needed && *arguments.scale_needed == 0) return;
  for (uint32_t i = blockIdx.x; i < metadata.chunks; i += gridDim.x) {
    const uint32_t number = kScaleBackwards ? metadata.chunks - 1 - i : i;
    const Chunk chunk = find_chunk(metadata, number);
    const uint32_t index = metadata.index[chunk.tensor];
    if (index == kSkipTensor) continue;
    const double factor = scalar_at(arguments.factors, index);
    const bool zero =
        arguments.zero_nonfinite && (!arguments.partials || has_nonfinite(arguments.partials[number]));
    if (factor == 1 && !zero) continue;
    dispatch(chunk.dtype, [&](auto type) {
      using Type = decltype(type);
      using Real = typename Type::Real;
      const Real own_factor = static_cast<Real>(factor);
      if (zero) {
        update_chunk<Type>(chunk, Scale<Real, true>{own_factor});
      } else {
        update_chunk<Type>(chunk, Scale<Real, false>{own_factor});
      }
    });
  }
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    clamp_kernel(FASTCLIP_PARAMETER(TensorListMetadata) metadata, const double limit) {
  for (uint32_t number = blockIdx.x; number < metadata.chunks; number += gridDim.x) {
    const Chunk chunk = find_chunk(metadata, number);
    if (metadata.index[chunk.tensor] == kSkipTensor) continue;
    dispatch(chunk.dtype, [&](auto type) {
      using Type = decltype(type);
      using Real = typename Type::Real;
      // torch compares with the limit rounded to the elements' dtype.
      update_chunk<Type>(chunk, Clamp<Real>{Type::from(Type::to(static_cast<Real>(limit)))});
    });
  }
}

static_assert(sizeof(TensorListMetadata) + sizeof(StatisticsArguments) + 16 <= kMaxParameterBytes,
              "too many parameters");

}  // namespace cuda
}  // namespace fastclip
