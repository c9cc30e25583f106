// SPDX-License-Identifier: BSD-3-Clause
// From the chunks' partial results to those of gradients and groups.

#pragma once

#include <vector>

#include "chunks.h"

namespace fastclip {

// The statistics of a list and of every chunk of it.
struct Statistics {
  std::vector<Partial> chunks;
  std::vector<Partial> grads;
  std::vector<double> totals;  // norm of each group, not yet rounded
};

Statistics compute_statistics(const GradientList& list, const ChunkTable& table, const Groups& groups,
                              Norm norm, bool finite_only);

}  // namespace fastclip
