// SPDX-License-Identifier: BSD-3-Clause
// Runs the threads of a kernel as system threads, all blocks at once.

#ifdef FASTCLIP_SHIM_THREADS

#include <pthread.h>

#include <thread>

#include "scheduler.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#else
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
#endif

namespace fastclip_shim {
namespace {

constexpr size_t kSharedSize = 16 << 10;

thread_local Thread current;

thread_local bool fenced = false;  // since the thread's last addition
thread_local uint32_t* added_to = nullptr;

}  // namespace

Settings& settings() {
  static Settings instance;
  return instance;
}

struct Barrier::State {
  pthread_barrier_t barrier;
};

Barrier::Barrier(int size) : state_(new State) { pthread_barrier_init(&state_->barrier, nullptr, size); }
Barrier::~Barrier() { pthread_barrier_destroy(&state_->barrier); }
void Barrier::wait() { pthread_barrier_wait(&state_->barrier); }

Thread& self() { return current; }

uint32_t add(uint32_t* number, uint32_t x) {
  if (fenced) __tsan_release(number);
  fenced = false;
  added_to = number;
  return __atomic_fetch_add(number, x, __ATOMIC_RELAXED);
}

void fence() {
  if (added_to) __tsan_acquire(added_to);
  fenced = true;
}

void run(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel) {
  std::vector<std::unique_ptr<Block>> resident;
  std::vector<std::thread> workers;
  for (uint32_t b = 0; b < blocks; ++b) {
    resident.push_back(std::make_unique<Block>(threads));
    resident.back()->memory.assign(kSharedSize, 0xa5);
  }
  for (uint32_t b = 0; b < blocks; ++b) {
    for (uint32_t t = 0; t < threads; ++t) {
      workers.emplace_back([&, b, t] {
        current = {t, b, blocks, resident[b].get()};
        kernel();
      });
    }
  }
  for (std::thread& worker : workers) worker.join();
}

}  // namespace fastclip_shim

#endif
