// SPDX-License-Identifier: BSD-3-Clause
// Detection of gradients that share memory. Gradients with exactly the same memory are chained; a partial
// overlap is an error, as the result would depend on the order in which threads write.

#include <algorithm>

#include "gradients.h"

namespace fastclip {
namespace {

struct Extent {
  uintptr_t begin;
  uintptr_t end;
  int32_t index;
};

Extent extent_of(const GradientList& list, int32_t index) {
  const Gradient& grad = list.items[index];
  int64_t elements = grad.numel;
  if (const Strides* strides = list.strides_of(grad)) {
    elements = 1;
    for (size_t d = 0; d < strides->sizes.size(); ++d) {
      elements += (strides->sizes[d] - 1) * strides->strides[d];
    }
  }
  const auto begin = reinterpret_cast<uintptr_t>(grad.data);
  return {begin, begin + elements * grad.item_size(), index};
}

// An unknown k of the equation sum(step * k) = distance, with low <= k <= high.
struct Term {
  int64_t step;  // in bytes
  int64_t low;
  int64_t high;
};

// Returns whether integers within their bounds solve the equation. Terms are sorted by falling step, so that
// only the few k are tried whose remainder the later terms can reach. `budget` limits the search; a search
// that exceeds it is taken for a solution.
bool solvable(const std::vector<Term>& terms, size_t first, int64_t distance, int* budget) {
  if (--*budget < 0) return true;  // unknown: assume an overlap
  int64_t least = 0, most = 0;
  for (size_t i = first + 1; i < terms.size(); ++i) {
    least += terms[i].step * terms[i].low;
    most += terms[i].step * terms[i].high;
  }
  const Term& term = terms[first];
  for (int64_t k = term.low; k <= term.high; ++k) {
    const int64_t rest = distance - term.step * k;
    if (rest > most) {  // skip to the first k within reach
      k += (rest - most - 1) / term.step;
      continue;
    }
    if (rest < least) break;
    if (first + 1 == terms.size() ? rest == 0 : solvable(terms, first + 1, rest, budget)) return true;
  }
  return false;
}

// Adds the terms that address every byte of a gradient; sign is -1 for the second of the two gradients.
void add_terms(const GradientList& list, const Gradient& grad, int64_t sign, std::vector<Term>* terms) {
  const int64_t item = grad.item_size();
  const auto add = [&](int64_t step, int64_t size) {
    if (size > 1) terms->push_back({step, sign < 0 ? 1 - size : 0, sign < 0 ? 0 : size - 1});
  };
  if (const Strides* strides = list.strides_of(grad)) {
    for (size_t d = 0; d < strides->sizes.size(); ++d) add(strides->strides[d] * item, strides->sizes[d]);
  } else {
    add(item, grad.numel);
  }
  add(1, item);
}

bool share_memory(const GradientList& list, const Gradient& a, const Gradient& b) {
  std::vector<Term> terms;
  add_terms(list, a, 1, &terms);
  add_terms(list, b, -1, &terms);
  std::stable_sort(terms.begin(), terms.end(), [](const Term& x, const Term& y) { return x.step > y.step; });
  int budget = 10000;
  return solvable(terms, 0, b.data - a.data, &budget);
}

bool same_memory(const GradientList& list, const Gradient& a, const Gradient& b) {
  if (a.data != b.data || a.numel != b.numel || a.dtype != b.dtype) return false;
  const Strides *of_a = list.strides_of(a), *of_b = list.strides_of(b);
  if (!of_a || !of_b) return of_a == of_b;
  return of_a->sizes == of_b->sizes && of_a->strides == of_b->strides;
}

}  // namespace

// Elements do not overlap if every stride exceeds the reach of all smaller strides together. Layouts that
// would need a search are taken to overlap.
bool overlaps_itself(const Strides& strides) {
  int64_t reach = 0;
  for (size_t d = strides.sizes.size(); d-- > 0;) {
    if (strides.strides[d] <= reach) return true;
    reach += (strides.sizes[d] - 1) * strides.strides[d];
  }
  return false;
}

void find_overlaps(GradientList& list, const char* op) {
  const auto count = static_cast<int32_t>(list.size());
  list.next_same.assign(count, -1);
  list.is_repeat.assign(count, false);
  std::vector<Extent> extents;
  extents.reserve(count);
  for (int32_t i = 0; i < count; ++i) {
    if (list.items[i].numel > 0) extents.push_back(extent_of(list, i));
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.index < b.index;
  });
  std::vector<Extent> open;  // earlier extents that end after the current one begins
  uintptr_t open_end = 0;
  for (const Extent& extent : extents) {
    if (extent.begin >= open_end) open.clear();
    bool repeats = false;
    for (Extent& other : open) {
      if (other.end <= extent.begin || repeats) continue;
      const Gradient &a = list.items[other.index], &b = list.items[extent.index];
      if (same_memory(list, a, b)) {
        list.next_same[other.index] = extent.index;
        list.is_repeat[extent.index] = true;
        other.index = extent.index;  // a third gradient is chained to this one
        repeats = true;
      } else if (share_memory(list, a, b)) {
        fail(op, "expected gradients that do not overlap, but grads[" +
                     std::to_string(std::min(other.index, extent.index)) + "] and grads[" +
                     std::to_string(std::max(other.index, extent.index)) + "] share part of their memory");
      }
    }
    if (!repeats) open.push_back(extent);
    open_end = std::max(open_end, extent.end);
  }
}

}  // namespace fastclip
