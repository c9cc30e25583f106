// SPDX-License-Identifier: BSD-3-Clause

#include "statistics.h"

#include <cmath>

#include "capability.h"

namespace fastclip {
namespace {

// Adds power sums, or keeps the larger of two magnitudes, where NaN wins.
void combine(const PartialStats& part, Norm norm, PartialStats* total) {
  if (norm == kNormInf) {
    if (!(part.value <= total->value)) total->value = std::isnan(total->value) ? total->value : part.value;
  } else {
    total->value += part.value;
  }
  total->nan_count += part.nan_count;
  total->inf_count += part.inf_count;
}

}  // namespace

Statistics compute_statistics(const GradientList& list, const ChunkTable& table, const Groups& groups,
                              Norm norm, bool finite_only) {
  Statistics statistics;
  statistics.chunks.resize(table.size());
  const Loops& loops = select_loops();
  table.for_each(Order::kForward, [&](int64_t i) {
    const Chunk& chunk = table[i];
    const auto reduce = loops.reduce[list.items[chunk.grad].dtype][norm];
    with_elements(list, chunk, Access::kRead,
                  [&](const void* data) { reduce(data, chunk.size, finite_only, &statistics.chunks[i]); });
  });
  statistics.grads.resize(list.size());
  for (int64_t i = 0; i < table.size(); ++i) {
    combine(statistics.chunks[i], norm, &statistics.grads[table[i].grad]);
  }
  std::vector<PartialStats> sums(groups.count());
  for (int64_t g = 0; g < list.size(); ++g) combine(statistics.grads[g], norm, &sums[groups.of(g)]);
  for (const PartialStats& sum : sums) {
    statistics.totals.push_back(norm == kNorm2 ? std::sqrt(sum.value) : sum.value);
  }
  return statistics;
}

}  // namespace fastclip
