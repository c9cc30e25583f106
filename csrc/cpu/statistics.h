// SPDX-License-Identifier: BSD-3-Clause
// Combines the statistics of chunks into those of gradients and groups.

#pragma once

#include <vector>

#include "chunks.h"

namespace fastclip {

struct Statistics {
  std::vector<PartialStats> chunks;
  std::vector<PartialStats> grads;
  std::vector<double> totals;  // norm of each group, not yet rounded to the result's dtype
};

Statistics compute_statistics(const GradientList& list, const ChunkTable& table, const Groups& groups,
                              Norm norm, bool finite_only);

}  // namespace fastclip
