// SPDX-License-Identifier: BSD-3-Clause
// The schemas of all fastclip ops. Implementations are registered at the end of the file that defines them,
// so that one list of signatures serves all devices.

#include <torch/csrc/stable/library.h>

// The tests define the same ops in another namespace, to run the CUDA kernels on a CPU.
#ifndef FASTCLIP_NAMESPACE
#define FASTCLIP_NAMESPACE fastclip
#endif

STABLE_TORCH_LIBRARY(FASTCLIP_NAMESPACE, m) {
  // Reads every gradient once. `stats` is [N, 3]: power sum (or maximum for norm_type inf), NaN count,
  // Inf count. `total_norm` is [G], one norm per group. `groups` holds the group of each gradient; if it is
  // empty, all gradients form one group.
  m.def(
      "grad_stats(Tensor[] grads, float norm_type, bool finite_only=False, int[] groups=[]) "
      "-> (Tensor total_norm, Tensor stats)");

  // Multiplies in place by one factor, or by one factor per gradient.
  m.def("scale_(Tensor(a!)[] grads, Tensor scale, bool zero_nonfinite=False) -> ()");

  // Clips in place: computes statistics and clip coefficients and scales. `summary` is [G, 3]: total norm,
  // clip coefficient, found_inf. `max_norm_tensor`, [1] or [G], replaces `max_norm`.
  m.def(
      "clip_(Tensor(a!)[] grads, float max_norm, float norm_type, str nonfinite, int[] groups=[], "
      "Tensor? max_norm_tensor=None, Tensor? inv_scale=None) -> (Tensor summary, Tensor stats)");

  // Clamps every element to [-limit, limit]; NaN stays.
  m.def("clamp_(Tensor(a!)[] grads, float limit) -> ()");

  // Returns the instruction set that the CPU loops run on.
  m.def("cpu_capability() -> str");
}
