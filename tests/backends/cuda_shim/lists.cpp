// SPDX-License-Identifier: BSD-3-Clause

#include "lists.h"

#include "../../../csrc/cuda/finalize.cuh"

namespace {

constexpr DType kDTypes[] = {kFloat32, kBFloat16, kFloat16, kFloat64};

// Sizes in elements around those of a vector, of what a block reads at once, and of a chunk.
std::vector<size_t> edges(DType dtype) {
  std::vector<size_t> sizes;
  for (size_t bytes : {kVectorBytes, kVectorBytes * kThreads, kChunkBytes}) {
    const size_t size = bytes / item_size(dtype);
    sizes.insert(sizes.end(), {size - 1, size, size + 1});
  }
  return sizes;
}

// Empty gradients first, last, next to each other, and alone.
List with_empty(DType dtype) {
  const size_t chunk = kChunkBytes / item_size(dtype);
  return List::normal(dtype, {0, 0, 5, 0, chunk, 0, 0, chunk + 1, 3, 0});
}

List with_nonfinite(DType dtype) {
  const size_t chunk = kChunkBytes / item_size(dtype);
  List list = List::normal(dtype, {3 * chunk + 5, 9, 2 * chunk, 1, 40});
  list[0].set(0, NAN);
  list[0].set(chunk, INFINITY);
  list[0].set(chunk + 1, -INFINITY);
  list[0].set(3 * chunk + 4, NAN);
  list[1].set(8, INFINITY);
  list[3].set(0, NAN);
  return list;
}

// Squares that overflow or underflow in float32, and zeros, which must not be taken for underflow.
List with_extremes(DType dtype) {
  const double large = dtype == kFloat16 ? 6e4 : 1e20, small = dtype == kFloat16 ? 6e-8 : 1e-25;
  List list;
  list.fill(dtype, 3000, large);
  list.fill(dtype, 3000, small);
  list.fill(dtype, kChunkBytes, 0).set(77, small);
  list.fill(dtype, kChunkBytes, 0);
  list.fill(dtype, 100, -0.0);
  list.fill(dtype, kChunkBytes, 0.1);
  return list;
}

List mixed() {
  List list;
  for (size_t size : {3, kChunkBytes / 4 + 1, 0, 100, kChunkBytes}) {
    for (DType dtype : kDTypes) list.add(dtype, size, size % 3);
  }
  return list;
}

List in_groups(bool sorted) {
  List list = mixed();
  for (size_t i = 0; i < list.size(); ++i) list[i].group = sorted ? i / 3 : (i * 7) % 5;
  return list;
}

// More gradients than one launch takes; each launch has some of several chunks.
List many() {
  List list;
  for (int i = 0; i < kMaxTensors + 7; ++i) list.add(kDTypes[i % 4], i % 800 ? i % 11 : kChunkBytes);
  return list;
}

}  // namespace

std::vector<std::pair<std::string, List>> all_lists(bool quick) {
  std::vector<std::pair<std::string, List>> lists;
  for (DType dtype : kDTypes) {
    const std::string name = " of dtype " + std::to_string(dtype);
    lists.emplace_back("edges" + name, List::normal(dtype, edges(dtype)));
    lists.emplace_back("empty" + name, with_empty(dtype));
    lists.emplace_back("nonfinite" + name, with_nonfinite(dtype));
    if (quick) continue;
    lists.emplace_back("misaligned" + name, List::normal(dtype, edges(dtype), 1));
    lists.emplace_back("misaligned by more" + name,
                       List::normal(dtype, edges(dtype), 16 / item_size(dtype) - 1));
    lists.emplace_back("extremes" + name, with_extremes(dtype));
  }
  lists.emplace_back("all dtypes", mixed());
  lists.emplace_back("sorted groups", in_groups(true));
  lists.emplace_back("groups in any order", in_groups(false));
  if (quick) return lists;
  lists.emplace_back("more than a launch", many());
  // More chunks than one warp combines.
  lists.emplace_back("segments", List::normal(kFloat64, {(2 * kSegment + 3) * kChunkBytes / 8}));
  return lists;
}
