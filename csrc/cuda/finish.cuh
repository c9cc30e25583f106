// SPDX-License-Identifier: BSD-3-Clause
// From the chunks to the result, in one launch: the warp that completes a segment of a gradient sums it up,
// and the block that finishes last sums up the gradients and decides what is to be written.

#pragma once

#include "../common/summary.h"
#include "launch.h"
#include "reduce.cuh"

namespace fastclip {
namespace cuda {

// Chunks that one warp sums up. Segments of a gradient are summed one after the other.
constexpr uint32_t kSegment = 512;

struct Counts {
  uint32_t nan;
  uint32_t inf;
};

__device__ __forceinline__ double number_at(const DeviceNumbers& numbers, uint32_t index) {
  const uint32_t i = numbers.several ? index : 0;
  return numbers.float64 ? static_cast<const double*>(numbers.data)[i]
                         : static_cast<const float*>(numbers.data)[i];
}

struct Workspace {
  uint32_t* blocks_done;   // zero before and after each launch
  uint32_t* segment_done;  // likewise, for each segment
  Row* segments;
  double* slots;       // of each chunk; the sign is set where `counts` holds something
  Counts* counts;      // of each chunk
  uint32_t* group_of;  // of each gradient
  double* factors;     // of each group
  uint32_t* wanted;    // whether the scale pass has anything to do
};

struct StatisticsArguments {
  Workspace workspace;
  Row* rows;           // of all gradients of the call
  uint32_t first_row;  // of this launch
  uint32_t num_rows;   // of the call
  bool last_launch;
  Request request;
};

// Number of segments before a gradient's own, unique though not without gaps.
FASTCLIP_HOST_DEVICE inline uint32_t first_segment(uint32_t first_chunk, uint32_t tensor) {
  return first_chunk / kSegment + tensor;
}

// Values are never negative, so that the sign can tell whether NaN or Inf were counted.
__device__ __forceinline__ bool has_counts(const Row& row) { return row.nan_count + row.inf_count > 0; }
__device__ __forceinline__ double to_slot(const Row& row) {
  return has_counts(row) ? from_bits(to_bits(row.value) | kSign64) : row.value;
}
__device__ __forceinline__ bool slot_is_counted(double slot) { return (to_bits(slot) & kSign64) != 0; }
__device__ __forceinline__ double slot_value(double slot) { return from_bits(to_bits(slot) & kAbs64); }

// By lane 0 only: a number that other blocks will read.
__device__ inline void store_slot(const Workspace& workspace, uint32_t chunk, const Row& row) {
  workspace.slots[chunk] = to_slot(row);
  if (has_counts(row)) {
    workspace.counts[chunk] = {static_cast<uint32_t>(row.nan_count), static_cast<uint32_t>(row.inf_count)};
  }
}

// Loads pass by the L1 cache, which may hold what was there before another block wrote.
__device__ inline Row load_slot(const Workspace& workspace, uint32_t chunk) {
  const double slot = __ldcg(workspace.slots + chunk);
  if (!slot_is_counted(slot)) return {slot, 0, 0};
  const Counts* counts = workspace.counts + chunk;
  return {slot_value(slot), static_cast<double>(__ldcg(&counts->nan)),
          static_cast<double>(__ldcg(&counts->inf))};
}

__device__ inline Row load_row(const Row* row) {
  return {__ldcg(&row->value), __ldcg(&row->nan_count), __ldcg(&row->inf_count)};
}

// By the first warp of a block: keeps the row of a chunk and, if all others of its segment are there, sums
// them up.
template <Norm norm>
__device__ inline void deliver(const Table& table, const Workspace& workspace, uint32_t number,
                               uint32_t tensor, const Row& row) {
  const uint32_t first = table.first_chunk[tensor];
  const uint32_t of_tensor = (number - first) / kSegment;
  const uint32_t begin = first + of_tensor * kSegment;
  const uint32_t rest = table.end_chunk(tensor) - begin;
  const uint32_t size = rest < kSegment ? rest : kSegment;
  const uint32_t segment = first_segment(first, tensor) + of_tensor;
  const uint32_t lane = threadIdx.x;
  if (lane == 0) store_slot(workspace, number, row);
  if (size == 1) {
    if (lane == 0) workspace.segments[segment] = row;
    return;
  }
  uint32_t done = 0;
  if (lane == 0) {
    __threadfence();
    done = atomicAdd(workspace.segment_done + segment, 1u) + 1;
  }
  if (__shfl_sync(kAllLanes, done, 0) != size) return;
  __threadfence();
  __syncwarp();
  Row sum = {0, 0, 0};
#pragma unroll 1
  for (uint32_t i = lane; i < size; i += kWarp) sum = join<norm>(sum, load_slot(workspace, begin + i));
  sum = reduce_warp<norm>(sum);
  if (lane == 0) {
    workspace.segments[segment] = sum;
    atomicExch(workspace.segment_done + segment, 0u);
  }
}

// Whether all other blocks have finished. What they wrote can then be read.
__device__ inline bool is_last_block(const Workspace& workspace, Shared& shared) {
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
__device__ inline void write_rows(const Table& table, const StatisticsArguments& arguments) {
  const Workspace& workspace = arguments.workspace;
#pragma unroll 1
  for (uint32_t t = threadIdx.x; t < table.count; t += kThreads) {
    const uint32_t chunks = table.end_chunk(t) - table.first_chunk[t];
    const uint32_t first = first_segment(table.first_chunk[t], t);
    Row sum = {0, 0, 0};
#pragma unroll 1
    for (uint32_t s = 0; s < (chunks + kSegment - 1) / kSegment; ++s) {
      sum = join<norm>(sum, load_row(workspace.segments + first + s));
    }
    arguments.rows[arguments.first_row + t] = sum;
    workspace.group_of[arguments.first_row + t] = table.index[t];
  }
}

// The rows of a group lie in [begin, end), between others if the groups are not sorted.
struct Range {
  uint32_t begin;
  uint32_t end;
};

__device__ inline uint32_t first_of_group(const StatisticsArguments& arguments, uint32_t group) {
  uint32_t low = 0, high = arguments.num_rows;
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

// With more groups than this, each has a thread of its own instead of a warp.
constexpr uint32_t kGroupsOfWarps = 8 * kWarps;

// The rows of a group, one in `step`, from that of this number on.
template <Norm norm>
__device__ inline Row sum_group(const StatisticsArguments& arguments, uint32_t group, uint32_t begin,
                                uint32_t step) {
  Range range = {0, arguments.num_rows};
  if (arguments.request.groups_sorted) {
    range = {first_of_group(arguments, group), first_of_group(arguments, group + 1)};
  }
  Row sum = {0, 0, 0};
#pragma unroll 1
  for (uint32_t r = range.begin + begin; r < range.end; r += step) {
    if (__ldcg(arguments.workspace.group_of + r) == group)
      sum = join<norm>(sum, load_row(arguments.rows + r));
  }
  return sum;
}

// What a group adds to the decision whether anything is to be written.
struct Decision {
  bool found_inf = false;
  bool scales = false;
};

template <class Real>
__device__ inline void write_result(const StatisticsArguments& arguments, uint32_t group, double total,
                                    bool found_nonfinite, Decision* decision) {
  Real* result = static_cast<Real*>(arguments.request.result);
  if (!arguments.request.clip) {
    result[group] = static_cast<Real>(total);
    return;
  }
  const MaxNorm max_norm = arguments.request.max_norms.data
                               ? MaxNorm{number_at(arguments.request.max_norms, group), true}
                               : MaxNorm{arguments.request.max_norm, false};
  const double inv_scale = arguments.request.inv_scale.data ? number_at(arguments.request.inv_scale, 0) : 1.0;
  const GroupSummary summary = summarize<Real>(total, max_norm, inv_scale, found_nonfinite);
  result[3 * group] = static_cast<Real>(summary.total_norm);
  result[3 * group + 1] = static_cast<Real>(summary.clip_coef);
  result[3 * group + 2] = summary.found_inf ? Real{1} : Real{0};
  arguments.workspace.factors[group] = summary.factor;
  decision->found_inf |= summary.found_inf;
  decision->scales |= summary.factor != 1;
}

// Leaves the sum of each group, as a slot, where its factor will stand.
template <Norm norm>
__device__ inline void sum_groups(const StatisticsArguments& arguments, Shared& shared) {
  double* sums = arguments.workspace.factors;
  const uint32_t groups = arguments.request.num_groups;
  if (groups == 1) {
    Row sum = {0, 0, 0};
#pragma unroll 1
    for (uint32_t r = threadIdx.x; r < arguments.num_rows; r += kThreads) {
      sum = join<norm>(sum, load_row(arguments.rows + r));
    }
    sum = reduce_block<norm>(sum, shared.rows);
    if (threadIdx.x == 0) sums[0] = to_slot(sum);
    return;
  }
  // A warp for each group, or a thread if there are many.
  const bool by_warps = groups <= kGroupsOfWarps || !arguments.request.groups_sorted;
  const uint32_t lanes = by_warps ? kWarp : 1;
#pragma unroll 1
  for (uint32_t g = threadIdx.x / lanes; g < groups; g += kThreads / lanes) {
    Row sum = sum_group<norm>(arguments, g, threadIdx.x % lanes, lanes);
    if (by_warps) sum = reduce_warp<norm>(sum);
    if (threadIdx.x % lanes == 0) sums[g] = to_slot(sum);
  }
}

// By the last block of the last launch.
template <Norm norm>
__device__ inline void finish_call(const StatisticsArguments& arguments, Shared& shared) {
  sum_groups<norm>(arguments, shared);
  __syncthreads();
  Decision decision;
#pragma unroll 1
  for (uint32_t g = threadIdx.x; g < arguments.request.num_groups; g += kThreads) {
    const double sum = arguments.workspace.factors[g];
    const double total = norm == kNorm2 ? sqrt(slot_value(sum)) : slot_value(sum);
    if (arguments.request.float64) {
      write_result<double>(arguments, g, total, slot_is_counted(sum), &decision);
    } else {
      write_result<float>(arguments, g, total, slot_is_counted(sum), &decision);
    }
  }
  const bool found_inf = __syncthreads_or(decision.found_inf);
  const bool scales = __syncthreads_or(decision.scales);
  if (threadIdx.x == 0 && arguments.request.clip) {
    const bool skips = arguments.request.nonfinite == NonFinite::kSkip && found_inf;
    const bool zeroes = arguments.request.nonfinite == NonFinite::kZero && found_inf;
    *arguments.workspace.wanted = !skips && (scales || zeroes);
  }
}

}  // namespace cuda
}  // namespace fastclip
