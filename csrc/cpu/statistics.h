// SPDX-License-Identifier: BSD-3-Clause
// From the chunks' partial results to norms, coefficients and the decision what to write.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "chunks.h"

namespace fastclip {

// The statistics of a list and of every chunk of it.
struct Statistics {
  std::vector<Partial> chunks;
  std::vector<Partial> grads;
  std::vector<double> totals;  // norm of each group, not yet rounded
};

// Which group each gradient belongs to.
class Groups {
 public:
  Groups(const std::vector<int64_t>& groups, int64_t num_grads, const char* op);
  int64_t count() const { return count_; }
  int64_t of(int64_t grad) const { return groups_.empty() ? 0 : groups_[grad]; }

 private:
  const std::vector<int64_t>& groups_;
  int64_t count_ = 1;
};

Norm parse_norm(double norm_type, const char* op);

Statistics compute_statistics(const GradientList& list, const ChunkTable& table, const Groups& groups,
                              Norm norm, bool finite_only);

struct GroupSummary {
  double total_norm;
  double clip_coef;
  bool found_inf;
};

// min(1, max_norm / (total_norm + 1e-6)) in the arithmetic of torch.nn.utils.clip_grad_norm_: float32, or
// float64 if any gradient is float64; a number is multiplied with the reciprocal, a tensor is divided.
template <class Real>
GroupSummary summarize(double total, double max_norm, bool max_norm_is_tensor, double inv_scale,
                       bool found_nonfinite);

}  // namespace fastclip
