// SPDX-License-Identifier: BSD-3-Clause
// The kernels as functions of raw device memory, for a compiler that knows neither CUDA nor torch.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../common/types.h"

namespace fastclip {
namespace cuda {

// One number or several in device memory; `data` is null where there are none.
struct DeviceNumbers {
  const void* data;
  bool float64;  // else float32
  bool several;
};

// What is wanted of the statistics pass.
struct Request {
  uint32_t num_groups;
  bool groups_sorted;
  bool finite_only;  // values of the finite elements, though the others are counted
  bool clip;         // a summary and factors for the scale pass, or norms only
  bool float64;      // the dtype of `result`, else float32
  NonFinite nonfinite;
  void* result;  // [G, 3]: total norm, clip coefficient, found_inf; or [G]: total norm
  double max_norm;
  DeviceNumbers max_norms;  // in place of max_norm, unless null
  DeviceNumbers inv_scale;
};

struct Item {
  char* data;
  int64_t numel;
  DType dtype;
  uint32_t index;   // of its group, or of its factor
  uint32_t repeat;  // how many items before this one have the very same memory
};

// All launches of one call. Errors of the CUDA runtime are thrown as std::runtime_error.
class Pass {
 public:
  Pass(std::vector<Item> items, uint32_t num_groups);

  // Memory on the device that statistics() and the scale() after it need.
  size_t workspace_bytes() const { return workspace_bytes_; }

  // Writes `stats`, [N, 3] in float64, and what `request` names. `stream` is a cudaStream_t.
  void statistics(Norm norm, const Request& request, double* stats, void* workspace, void* stream) const;

  // Scales as the statistics in the workspace demand.
  void scale_as_decided(bool zero_nonfinite, void* workspace, void* stream) const;
  // Scales by factors from elsewhere, [1] or one for each index.
  void scale(DeviceNumbers factors, bool zero_nonfinite, void* stream) const;
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
