// SPDX-License-Identifier: BSD-3-Clause
// A list of gradients cut into runs of a fixed size, worked on by all threads.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

#include "../common/gradients.h"
#include "loops.h"

namespace fastclip {

// Part of every result: the order of summation, and so the last bits of a norm, depend on it. 32,768
// elements are enough work for a thread and stay in its cache for a second reading.
constexpr int64_t kChunkSize = 32768;

// A thread is woken for no less than this, some 20 us of work. On a busy machine it may start milliseconds
// late while everyone waits for it, and small gradients lie in the cache of the thread that wrote them: a
// second one gained 15 us or lost 150 on 150 gradients of 4,096 elements. torch does those on one thread too.
constexpr int64_t kElementsPerWorker = int64_t{3} << 17;

// How many batches a backward run takes forwards before it steps back.
constexpr int64_t kStretch = 32;

struct Chunk {
  int32_t grad;
  int64_t offset;  // in elements
  int64_t size;
};

enum class Order { kForward, kBackward };

class ChunkTable {
 public:
  explicit ChunkTable(const GradientList& list);

  int64_t size() const { return static_cast<int64_t>(chunks_.size()); }
  const Chunk& operator[](int64_t i) const { return chunks_[i]; }

  // Calls visit(i) once for every chunk i, from several threads. Backwards, the memory touched last by a
  // forward run, which may still be cached, comes first; but in stretches that are long enough for the
  // processor to fetch ahead in them (a stretch of one chunk cost 13 % of the bandwidth).
  template <class Visit>
  void for_each(Order order, const Visit& visit) const;

 private:
  // The k-th of `size` batches in a backward run.
  static int64_t backward(int64_t k, int64_t size) {
    const int64_t end = size - k / kStretch * kStretch;
    return std::max<int64_t>(end - kStretch, 0) + k % kStretch;
  }

  // The batches that one worker takes first. A cache line each, since all are counted up at once.
  struct alignas(64) Share {
    int64_t first = 0;
    int64_t size = 0;
    std::atomic<int64_t> taken{0};
  };

  int64_t elements_ = 0;
  std::vector<Chunk> chunks_;
  std::vector<int64_t> batches_;  // first chunk of each batch of about kChunkSize elements, and the end
};

template <class Visit>
void ChunkTable::for_each(Order order, const Visit& visit) const {
  const auto batches = static_cast<int64_t>(batches_.size()) - 1;
  const int64_t workers =
      std::clamp<int64_t>(elements_ / kElementsPerWorker, 1, torch::stable::get_num_threads());
  // Each worker has a share of its own, the same in every run over this table, so that it finds in its
  // cache what it touched before; one that is done helps the others, so that a thread which is held up
  // delays nobody. Results do not depend on who does what: each chunk has a place of its own for them.
  std::vector<Share> shares(workers);
  for (int64_t w = 0; w < workers; ++w) {
    shares[w].first = batches * w / workers;
    shares[w].size = batches * (w + 1) / workers - shares[w].first;
  }
  const auto work = [&](int64_t worker, int64_t) {
    for (int64_t turn = 0; turn < workers; ++turn) {
      Share& share = shares[(worker + turn) % workers];
      for (int64_t k; (k = share.taken.fetch_add(1, std::memory_order_relaxed)) < share.size;) {
        const int64_t batch = share.first + (order == Order::kForward ? k : backward(k, share.size));
        for (int64_t i = batches_[batch]; i < batches_[batch + 1]; ++i) visit(i);
      }
    }
  };
  if (workers == 1) {
    work(0, 1);
  } else {
    torch::stable::parallel_for(0, workers, 1, work);
  }
}

// Copies the elements of a chunk of a gradient with gaps to a buffer, or back.
enum class Copy { kToBuffer, kFromBuffer };
void copy_with_gaps(const Gradient& grad, const Strides& strides, const Chunk& chunk, char* buffer,
                    Copy copy);

// Calls use(data) with the elements of a chunk as one run.
template <class Use>
void with_elements(const GradientList& list, const Chunk& chunk, Access access, const Use& use) {
  const Gradient& grad = list.items[chunk.grad];
  const Strides* strides = list.strides_of(grad);
  if (!strides) {
    use(grad.data + chunk.offset * grad.item_size());
    return;
  }
  std::vector<char> buffer(chunk.size * grad.item_size());
  copy_with_gaps(grad, *strides, chunk, buffer.data(), Copy::kToBuffer);
  use(buffer.data());
  if (access == Access::kWrite) {
    copy_with_gaps(grad, *strides, chunk, buffer.data(), Copy::kFromBuffer);
  }
}

}  // namespace fastclip
