// SPDX-License-Identifier: BSD-3-Clause
// From a norm to the clip coefficient, the same on every device.

#pragma once

#include "types.h"

namespace fastclip {

struct GroupSummary {
  double total_norm;
  double clip_coef;
  bool found_inf;
  double factor;  // what the gradients are multiplied with: the coefficient and the inverse scale
};

// A limit given as a number is multiplied with the reciprocal, one given as a tensor is divided: so torch
// does it, and the last bit depends on it.
struct MaxNorm {
  double value;
  bool is_tensor;
};

// min(1, max_norm / (total_norm + 1e-6)) in the arithmetic of torch.nn.utils.clip_grad_norm_: float32, or
// float64 if any gradient is float64. The factor is rounded as the product of two such tensors would be.
template <class Real>
FASTCLIP_HOST_DEVICE inline GroupSummary summarize(double total, MaxNorm max_norm, double inv_scale,
                                                   bool found_nonfinite) {
  const Real total_norm = static_cast<Real>(total * inv_scale);
  const Real limit = static_cast<Real>(max_norm.value);
  const Real padded = total_norm + static_cast<Real>(1e-6);
  Real coef = max_norm.is_tensor ? limit / padded : Real{1} / padded * limit;
  if (coef > 1) coef = 1;                                  // keeps NaN
  const bool finite = total_norm - total_norm == Real{0};  // neither NaN nor Inf
  const bool usable = !found_nonfinite && finite && coef >= 0;
  return {total_norm, coef, !usable, coef * static_cast<Real>(inv_scale)};
}

}  // namespace fastclip
