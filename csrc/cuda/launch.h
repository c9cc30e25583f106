// SPDX-License-Identifier: BSD-3-Clause
// Host-side interface to the kernels: raw device pointers only, so that it needs neither CUDA's nor torch's
// headers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../common/types.h"

namespace fastclip {
namespace cuda {

// A scalar, or one scalar per index, in device memory; `data` is null where there is none.
struct DeviceScalars {
  const void* data;
  bool float64;  // dtype of `data`; else float32
  bool per_index;
};

// What the statistics kernel computes and where it writes the result.
struct StatisticsOptions {
  uint32_t num_groups;
  bool groups_sorted;
  bool finite_only;  // NaN and Inf are counted but do not enter the values
  bool clip;         // compute the summary and the factors for apply_clip(), else norms only
  bool float64;      // dtype of `result`; else float32
  NonFinite nonfinite;
  void* result;  // [G, 3]: total norm, clip coefficient, found_inf; or [G]: total norm
  double max_norm;
  DeviceScalars max_norms;  // replaces max_norm unless null
  DeviceScalars inv_scale;
};

struct Item {
  char* data;
  int64_t numel;
  DType dtype;
  uint32_t index;   // index of its group, or of its factor
  uint32_t repeat;  // number of earlier items with exactly the same memory
};

// The kernel launches of one call. CUDA runtime errors are thrown as std::runtime_error.
class LaunchPlan {
 public:
  LaunchPlan(std::vector<Item> items, uint32_t num_groups);

  // Bytes of device memory that statistics() and a following apply_clip() need.
  size_t workspace_bytes() const { return workspace_bytes_; }

  // Writes `stats`, [N, 3] in float64, and `options.result`. `stream` is a cudaStream_t.
  void statistics(Norm norm, const StatisticsOptions& options, double* stats, void* workspace,
                  void* stream) const;

  // Scales by the factors that statistics() left in the workspace, if it found that to be needed.
  void apply_clip(bool zero_nonfinite, void* workspace, void* stream) const;
  // Scales by the given factors, [1] or one per index.
  void scale(DeviceScalars factors, bool zero_nonfinite, void* stream) const;
  void clamp(double limit, void* stream) const;

 private:
  struct Launch {
    size_t first_item;
    uint32_t count;
    uint64_t first_chunk;
    uint32_t chunks;
  };
  struct Layout;

  template <class Work>
  void for_each_round(const Work& work) const;

  std::vector<Item> items_;
  std::vector<Launch> launches_;
  uint32_t num_groups_;
  uint32_t rounds_ = 1;
  size_t workspace_bytes_ = 0;
};

}  // namespace cuda
}  // namespace fastclip
