// SPDX-License-Identifier: BSD-3-Clause
// The kernels. Blocks walk the chunks with the stride of the grid; what is computed does not depend on it.

#pragma once

#include "update.cuh"

namespace fastclip {
namespace cuda {

template <Norm norm>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    statistics_kernel(FASTCLIP_PARAMETER(Table) table, FASTCLIP_PARAMETER(StatisticsArguments) arguments) {
  FASTCLIP_SHARED(Shared, shared);
  for (uint32_t number = blockIdx.x; number < table.chunks;) {
    const Chunk chunk = find_chunk(table, number);
    Row row;
    dispatch(chunk.dtype, [&](auto type) {
      row = reduce_chunk<decltype(type), norm>(chunk, arguments.request.finite_only, shared);
    });
    number = shared.chunk.number;
    const uint32_t tensor = shared.chunk.tensor;
    __syncthreads();  // before `shared` is written for the next chunk, which the other warps begin to read
    if (threadIdx.x < kWarp) deliver<norm>(table, arguments.workspace, number, tensor, row);
    number += gridDim.x;
  }
  if (!is_last_block(arguments.workspace, shared)) return;
  write_rows<norm>(table, arguments);
  if (!arguments.last_launch) return;
  __syncthreads();
  finish_call<norm>(arguments, shared);
}

struct ScaleArguments {
  const uint32_t* wanted;  // null if it is known that there is something to do
  DeviceNumbers factors;
  const double* slots;  // tells which chunks hold NaN or Inf; null if that is not known
  bool zero_nonfinite;
};

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    scale_kernel(FASTCLIP_PARAMETER(Table) table, FASTCLIP_PARAMETER(ScaleArguments) arguments) {
  if (arguments.wanted && *arguments.wanted == 0) return;
  for (uint32_t i = blockIdx.x; i < table.chunks; i += gridDim.x) {
    const uint32_t number = kScaleBackwards ? table.chunks - 1 - i : i;
    const Chunk chunk = find_chunk(table, number);
    const uint32_t index = table.index[chunk.tensor];
    if (index == kLeftOut) continue;
    const double factor = number_at(arguments.factors, index);
    const bool zero =
        arguments.zero_nonfinite && (!arguments.slots || slot_is_counted(arguments.slots[number]));
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
    clamp_kernel(FASTCLIP_PARAMETER(Table) table, const double limit) {
  for (uint32_t number = blockIdx.x; number < table.chunks; number += gridDim.x) {
    const Chunk chunk = find_chunk(table, number);
    if (table.index[chunk.tensor] == kLeftOut) continue;
    dispatch(chunk.dtype, [&](auto type) {
      using Type = decltype(type);
      using Real = typename Type::Real;
      // The limit as a number of the elements' type, as torch compares it.
      update_chunk<Type>(chunk, Clamp<Real>{Type::from(Type::to(static_cast<Real>(limit)))});
    });
  }
}

static_assert(sizeof(Table) + sizeof(StatisticsArguments) + 16 <= kMaxParameterBytes, "too many parameters");

}  // namespace cuda
}  // namespace fastclip
