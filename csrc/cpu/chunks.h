// SPDX-License-Identifier: BSD-3-Clause
// A list of gradients split into chunks of a fixed size, which all threads work on.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

#include "../common/gradients.h"
#include "loops.h"

namespace fastclip {

// Changing this changes the order of summation and so the last bits of every norm. 32,768 elements are enough
// work for a thread and stay in its cache for a second reading.
constexpr int64_t kChunkSize = 32768;

// A thread is woken for no less than this, some 20 us of work. On a busy machine it may start milliseconds
// late while all others wait for it, and small gradients are in the cache of the thread that wrote them: on
// 150 gradients of 4,096 elements a second thread gained 15 us or lost 150. torch uses one thread for those,
// too.
constexpr int64_t kElementsPerWorker = int64_t{3} << 17;

// Number of batches that a backward run processes forwards before it steps back.
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

  // Calls visit(i) once for every chunk i, from several threads. A backward run starts with the memory that a
  // forward run touched last, which may still be cached, and goes back in stretches long enough for the
  // processor to prefetch (a stretch of one chunk cost 13 % of the bandwidth).
  template <class Visit>
  void for_each(Order order, const Visit& visit) const;

 private:
  // Returns the index of the k-th of `size` batches in a backward run.
  static int64_t backward(int64_t k, int64_t size) {
    const int64_t end = size - k / kStretch * kStretch;
    return std::max<int64_t>(end - kStretch, 0) + k % kStretch;
  }

  // The batches that one worker takes first. On a cache line of its own, as workers count concurrently.
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
  // Each worker has its own share, the same in every run over this table, so that it finds in its cache what
  // it touched before. A worker that is done helps the others, so that a delayed thread delays nobody.
  // Results do not depend on which worker takes a chunk: each chunk has its own place for them.
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

// Copies a chunk of a gradient whose memory has gaps to a contiguous buffer, or back.
enum class Copy { kToBuffer, kFromBuffer };
void copy_with_gaps(const Gradient& grad, const Strides& strides, const Chunk& chunk, char* buffer,
                    Copy copy);

// Calls use(data) with the elements of a chunk as one contiguous run.
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
