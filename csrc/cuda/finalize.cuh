// SPDX-License-Identifier: BSD-3-Clause
// Combines the partials of all chunks within the same launch: the warp that completes a segment of a gradient
// combines its chunks, and the last block to finish combines the gradients and decides whether to scale them.

#pragma once

#include "../common/clip_summary.h"
#include "launch.h"
#include "reduce.cuh"

namespace fastclip {
namespace cuda {

// Chunks that one warp combines. The segments of a gradient are combined one after the other.
constexpr uint32_t kSegment = 512;

struct Counts {
  uint32_t nan;
  uint32_t inf;
};

__device__ __forceinline__ double scalar_at(const DeviceScalars& scalars, uint32_t index) {
  const uint32_t i = scalars.per_index ? index : 0;
  return scalars.float64 ? static_cast<const double*>(scalars.data)[i]
                         : static_cast<const float*>(scalars.data)[i];
}

struct Workspace {
  uint32_t* blocks_done;   // blocks that have finished; zero before and after each launch
  uint32_t* segment_done;  // per segment: chunks that have finished; zero before and after each launch
  PartialStats* segments;
  double* partials;        // per chunk: its value, with the sign set where `counts` is valid
  Counts* counts;          // per chunk
  uint32_t* group_of;      // per gradient
  double* factors;         // per group
  uint32_t* scale_needed;  // whether the scale kernel must run; else it returns at once
};

struct StatisticsArguments {
  Workspace workspace;
  PartialStats* stats;    // per gradient of the call
  uint32_t first_tensor;  // index of this launch's first gradient
  uint32_t num_tensors;   // number of gradients of the call
  bool last_launch;
  StatisticsOptions options;
};

// Index of a gradient's first segment. Indices are unique but may have gaps.
FASTCLIP_HOST_DEVICE inline uint32_t first_segment(uint32_t first_chunk, uint32_t tensor) {
  return first_chunk / kSegment + tensor;
}

// A partial is a chunk's value, which is never negative; a set sign marks that NaN or Inf were counted.
__device__ __forceinline__ bool has_nonfinite(const PartialStats& stats) {
  return stats.nan_count + stats.inf_count > 0;
}
__device__ __forceinline__ double encode_partial(const PartialStats& stats) {
  return has_nonfinite(stats) ? from_bits(to_bits(stats.value) | kSign64) : stats.value;
}
__device__ __forceinline__ bool has_nonfinite(double partial) { return (to_bits(partial) & kSign64) != 0; }
__device__ __forceinline__ double partial_value(double partial) {
  return from_bits(to_bits(partial) & kAbs64);
}

// Loads bypass the L1 cache, which may hold values from before another block's store.
__device__ inline PartialStats load_partial(const Workspace& workspace, uint32_t chunk) {
  const double partial = __ldcg(workspace.partials + chunk);
  if (!has_nonfinite(partial)) return {partial, 0, 0};
  const Counts* counts = workspace.counts + chunk;
  return {partial_value(partial), static_cast<double>(__ldcg(&counts->nan)),
          static_cast<double>(__ldcg(&counts->inf))};
}

__device__ inline PartialStats load_stats(const PartialStats* stats) {
  return {__ldcg(&stats->value), __ldcg(&stats->nan_count), __ldcg(&stats->inf_count)};
}

// Stores the statistics of a chunk and, if it is the last of its segment, combines the segment. Called by the
// first warp of a block.
template <Norm norm>
__device__ inline void store_partial(const TensorListMetadata& metadata, const Workspace& workspace,
                                     uint32_t number, uint32_t tensor, const PartialStats& stats) {
  const uint32_t first = metadata.first_chunk[tensor];
  const uint32_t segment_in_tensor = (number - first) / kSegment;
  const uint32_t begin = first + segment_in_tensor * kSegment;
  const uint32_t rest = metadata.end_chunk(tensor) - begin;
  const uint32_t size = rest < kSegment ? rest : kSegment;
  const uint32_t segment = first_segment(first, tensor) + segment_in_tensor;
  const uint32_t lane = threadIdx.x;
  if (lane == 0) {
    workspace.partials[number] = encode_partial(stats);
    if (has_nonfinite(stats)) {
      workspace.counts[number] = {static_cast<uint32_t>(stats.nan_count),
                                  static_cast<uint32_t>(stats.inf_count)};
    }
  }
  if (size == 1) {
    if (lane == 0) workspace.segments[segment] = stats;
    return;
  }
  uint32_t done = 0;
  if (lane == 0) {
    __threadfence();
    done = atomicAdd(workspace.segment_done + segment, 1u) + 1;
  }
  if (__shfl_sync(kFullWarpMask, done, 0) != size) return;
  __threadfence();
  __syncwarp();
  PartialStats sum = {0, 0, 0};
#pragma unroll 1
  for (uint32_t i = lane; i < size; i += kWarpSize)
    sum = combine<norm>(sum, load_partial(workspace, begin + i));
  sum = reduce_warp<norm>(sum);
  if (lane == 0) {
    workspace.segments[segment] = sum;
    atomicExch(workspace.segment_done + segment, 0u);
  }
}

// Returns whether all other blocks have finished, so that their stores are visible.
__device__ inline bool is_last_block(const Workspace& workspace, SharedMemory& shared) {
  if (threadIdx.x == 0) {
    __threadfence();
    shared.last_block = atomicAdd(workspace.blocks_done, 1u) + 1 == gridDim.x;
    if (shared.last_block) {
      __threadfence();
      atomicExch(workspace.blocks_done, 0u);
    }
  }
  __syncthreads();
  return shared.last_block;
}

template <Norm norm>
__device__ inline void write_stats(const TensorListMetadata& metadata, const StatisticsArguments& arguments) {
  const Workspace& workspace = arguments.workspace;
#pragma unroll 1
  for (uint32_t t = threadIdx.x; t < metadata.count; t += kThreads) {
    const uint32_t chunks = metadata.end_chunk(t) - metadata.first_chunk[t];
    const uint32_t first = first_segment(metadata.first_chunk[t], t);
    PartialStats sum = {0, 0, 0};
#pragma unroll 1
    for (uint32_t s = 0; s < (chunks + kSegment - 1) / kSegment; ++s) {
      sum = combine<norm>(sum, load_stats(workspace.segments + first + s));
    }
    arguments.stats[arguments.first_tensor + t] = sum;
    workspace.group_of[arguments.first_tensor + t] = metadata.index[t];
  }
}

// The gradients of a group lie in [begin, end), mixed with those of other groups if the groups are not
// sorted.
struct Range {
  uint32_t begin;
  uint32_t end;
};

__device__ inline uint32_t first_tensor_of_group(const StatisticsArguments& arguments, uint32_t group) {
  uint32_t low = 0, high = arguments.num_tensors;
#pragma unroll 1
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (__ldcg(arguments.workspace.group_of + middle) < group) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// With more groups than this, each is combined by a single thread instead of a warp.
constexpr uint32_t kMaxGroupsByWarps = 8 * kWarps;

// Combines every step-th gradient of a group, starting with its begin-th.
template <Norm norm>
__device__ inline PartialStats sum_group(const StatisticsArguments& arguments, uint32_t group, uint32_t begin,
                                         uint32_t step) {
  Range range = {0, arguments.num_tensors};
  if (arguments.options.groups_sorted) {
    range = {first_tensor_of_group(arguments, group), first_tensor_of_group(arguments, group + 1)};
  }
  PartialStats sum = {0, 0, 0};
#pragma unroll 1
  for (uint32_t r = range.begin + begin; r < range.end; r += step) {
    if (__ldcg(arguments.workspace.group_of + r) == group)
      sum = combine<norm>(sum, load_stats(arguments.stats + r));
  }
  return sum;
}

// One thread's contribution to the decision whether the gradients are scaled.
struct Decision {
  bool found_inf = false;
  bool scales = false;
};

template <class Real>
__device__ inline void write_result(const StatisticsArguments& arguments, uint32_t group, double total,
                                    bool found_nonfinite, Decision* decision) {
  Real* result = static_cast<Real*>(arguments.options.result);
  if (!arguments.options.clip) {
    result[group] = static_cast<Real>(total);
    return;
  }
  const MaxNorm max_norm = arguments.options.max_norms.data
                               ? MaxNorm{scalar_at(arguments.options.max_norms, group), true}
                               : MaxNorm{arguments.options.max_norm, false};
  const double inv_scale = arguments.options.inv_scale.data ? scalar_at(arguments.options.inv_scale, 0) : 1.0;
  const ClipSummary summary = summarize<Real>(total, max_norm, inv_scale, found_nonfinite);
  result[3 * group] = static_cast<Real>(summary.total_norm);
  result[3 * group + 1] = static_cast<Real>(summary.clip_coef);
  result[3 * group + 2] = summary.found_inf ? Real{1} : Real{0};
  arguments.workspace.factors[group] = summary.factor;
  decision->found_inf |= summary.found_inf;
  decision->scales |= summary.factor != 1;
}

// Writes the encoded partial of each group to `factors`; finalize() replaces it by the group's factor.
template <Norm norm>
__device__ inline void sum_groups(const StatisticsArguments& arguments, SharedMemory& shared) {
  double* sums = arguments.workspace.factors;
  const uint32_t groups = arguments.options.num_groups;
  if (groups == 1) {
    PartialStats sum = {0, 0, 0};
#pragma unroll 1
    for (uint32_t r = threadIdx.x; r < arguments.num_tensors; r += kThreads) {
      sum = combine<norm>(sum, load_stats(arguments.stats + r));
    }
    sum = reduce_block<norm>(sum, shared.warp_stats);
    if (threadIdx.x == 0) sums[0] = encode_partial(sum);
    return;
  }
  // One warp per group, or one thread per group if there are many.
  const bool by_warps = groups <= kMaxGroupsByWarps || !arguments.options.groups_sorted;
  const uint32_t lanes = by_warps ? kWarpSize : 1;
#pragma unroll 1
  for (uint32_t g = threadIdx.x / lanes; g < groups; g += kThreads / lanes) {
    PartialStats sum = sum_group<norm>(arguments, g, threadIdx.x % lanes, lanes);
    if (by_warps) sum = reduce_warp<norm>(sum);
    if (threadIdx.x % lanes == 0) sums[g] = encode_partial(sum);
  }
}

// Turns the groups' sums into the result of the call. Called by the last block of the last launch.
template <Norm norm>
__device__ inline void finalize(const StatisticsArguments& arguments, SharedMemory& shared) {
  sum_groups<norm>(arguments, shared);
  __syncthreads();
  Decision decision;
#pragma unroll 1
  for (uint32_t g = threadIdx.x; g < arguments.options.num_groups; g += kThreads) {
    const double sum = arguments.workspace.factors[g];
    const double total = norm == kNorm2 ? sqrt(partial_value(sum)) : partial_value(sum);
    if (arguments.options.float64) {
      write_result<double>(arguments, g, total, has_nonfinite(sum), &decision);
    } else {
      write_result<float>(arguments, g, total, has_nonfinite(sum), &decision);
    }
  }
  const bool found_inf = __syncthreads_or(decision.found_inf);
  const bool scales = __syncthreads_or(decision.scales);
  if (threadIdx.x == 0 && arguments.options.clip) {
    const bool skips = arguments.options.nonfinite == NonFinite::kSkip && found_inf;
    const bool zeroes = arguments.options.nonfinite == NonFinite::kZero && found_inf;
    *arguments.workspace.scale_needed = !skips && (scales || zeroes);
  }
}

}  // namespace cuda
}  // namespace fastclip
