// SPDX-License-Identifier: BSD-3-Clause
// The clip coefficient of a norm, computed alike on every device.

#pragma once

#include "types.h"

namespace fastclip {

struct ClipSummary {
  double total_norm;
  double clip_coef;
  bool found_inf;
  double factor;  // the gradients are multiplied by this: clip_coef times the inverse loss scale
};

// As in torch, a max_norm that is a number is multiplied by a reciprocal and one that is a tensor is divided;
// the last bit of the coefficient depends on it.
struct MaxNorm {
  double value;
  bool is_tensor;
};

// min(1, max_norm / (total_norm + 1e-6)) in the arithmetic of torch.nn.utils.clip_grad_norm_: float32, or
// float64 if any gradient is float64. The factor is rounded like the product of two such tensors.
template <class Real>
FASTCLIP_HOST_DEVICE inline ClipSummary summarize(double total, MaxNorm max_norm, double inv_scale,
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
