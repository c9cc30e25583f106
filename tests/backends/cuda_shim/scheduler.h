// SPDX-License-Identifier: BSD-3-Clause
// Runs the threads of a kernel as fibers of one thread, in an order given by a seed, or, if
// FASTCLIP_SHIM_THREADS is defined, each as a system thread, so that ThreadSanitizer sees every race.

#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace fastclip_shim {

struct Settings {
  int blocks = 3;     // resident blocks of the device, and so the largest grid
  unsigned seed = 0;  // of the order of blocks and threads; 0 is the natural order
};
Settings& settings();

// Blocks until `size` threads have called wait().
class Barrier {
 public:
  explicit Barrier(int size);
  ~Barrier();
  Barrier(const Barrier&) = delete;
  void wait();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

constexpr int kLanes = 32;

struct Warp {
  Barrier barrier{kLanes};
  uint64_t values[kLanes];
  int votes[kLanes];
};

struct Block {
  explicit Block(int threads) : barrier(threads), votes(threads) {
    for (int i = 0; i < threads / kLanes; ++i) warps.push_back(std::make_unique<Warp>());
  }
  Barrier barrier;
  std::vector<int> votes;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<unsigned char> memory;  // shared memory; garbage at first
};

struct Thread {
  uint32_t thread_index;
  uint32_t block_index;
  uint32_t grid_size;
  Block* block;
};

// The thread that is running.
Thread& self();

inline int lane() { return self().thread_index % kLanes; }
inline Warp& warp() { return *self().block->warps[self().thread_index / kLanes]; }

template <class T>
T& block_memory() {
  return *reinterpret_cast<T*>(self().block->memory.data());
}

template <class T>
T exchange(T x, int from) {
  Warp& mine = warp();
  std::memcpy(&mine.values[lane()], &x, sizeof x);
  mine.barrier.wait();
  std::memcpy(&x, &mine.values[from], sizeof x);
  mine.barrier.wait();
  return x;
}

template <class Votes>
int any(Barrier& barrier, Votes& votes, int place, int vote) {
  votes[place] = vote;
  barrier.wait();
  int found = 0;
  for (int other : votes) found |= other != 0;
  barrier.wait();
  return found;
}

// A relaxed addition, which alone orders nothing. What a thread wrote before a fence and an addition is
// visible to a thread that executes a later addition to the same number and then a fence. ThreadSanitizer is
// notified of exactly this, so that it reports a missing fence.
uint32_t add(uint32_t* number, uint32_t x);
void fence();

void run(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel);

}  // namespace fastclip_shim
