// SPDX-License-Identifier: BSD-3-Clause
// Runs the threads of a kernel as fibers, which switch at barriers only. A barrier that some threads never
// reach aborts the program.

#ifndef FASTCLIP_SHIM_THREADS

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "scheduler.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace fastclip_shim {
namespace {

constexpr size_t kStackSize = 128 << 10;
constexpr size_t kSharedSize = 16 << 10;
constexpr size_t kResidentBlocks = 2;  // blocks whose threads run interleaved

struct Fiber {
  Thread thread;
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackSize);
  const std::function<bool()>* blocked = nullptr;  // true while it must wait
  bool started = false;
  bool finished = false;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
#else
  jmp_buf place;
#endif
};

Fiber* running = nullptr;
#if defined(__SANITIZE_ADDRESS__)
ucontext_t scheduler;
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_size = 0;
#else
jmp_buf scheduler_place;
#endif
const std::function<void()>* body = nullptr;

// A fiber is entered through its context. Later switches use longjmp, which unlike swapcontext makes no
// system call; under AddressSanitizer, which must be notified of every switch, they use swapcontext.
#if defined(__SANITIZE_ADDRESS__)
void leave(bool for_good) {
  Fiber* fiber = running;
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber->fake_stack, scheduler_stack,
                                 scheduler_stack_size);
  swapcontext(&fiber->context, &scheduler);
  __sanitizer_finish_switch_fiber(fiber->fake_stack, &scheduler_stack, &scheduler_stack_size);
}

void arrive() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size); }

void change_to(Fiber& fiber) {
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack.data(), fiber.stack.size());
  swapcontext(&scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
}
#else
void leave(bool) {
  if (_setjmp(running->place) == 0) _longjmp(scheduler_place, 1);
}

void arrive() {}

void change_to(Fiber& fiber) {
  if (_setjmp(scheduler_place) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  setcontext(&fiber.context);
}
#endif

void enter() {
  arrive();
  running->started = true;
  (*body)();
  running->finished = true;
  leave(true);
}

void resume(Fiber& fiber) {
  running = &fiber;
  change_to(fiber);
  running = nullptr;
}

void start(Fiber& fiber) {
  fiber.started = fiber.finished = false;
  fiber.blocked = nullptr;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.data();
  fiber.context.uc_stack.ss_size = fiber.stack.size();
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
}

void run_to_the_end(std::vector<Fiber*>& fibers, std::mt19937& random) {
  while (!fibers.empty()) {
    if (settings().seed) std::shuffle(fibers.begin(), fibers.end(), random);
    bool moved = false;
    for (Fiber* fiber : fibers) {
      if (fiber->blocked && (*fiber->blocked)()) continue;
      fiber->blocked = nullptr;
      moved = true;
      resume(*fiber);
    }
    if (!moved) {
      std::fprintf(stderr, "a barrier was not reached by all of its threads\n");
      std::abort();
    }
    fibers.erase(std::remove_if(fibers.begin(), fibers.end(), [](Fiber* f) { return f->finished; }),
                 fibers.end());
  }
}

}  // namespace

Settings& settings() {
  static Settings instance;
  return instance;
}

struct Barrier::State {
  int size;
  int arrived = 0;
  uint64_t generation = 0;
};

Barrier::Barrier(int size) : state_(new State{size}) {}
Barrier::~Barrier() = default;

void Barrier::wait() {
  State& state = *state_;
  if (++state.arrived == state.size) {
    state.arrived = 0;
    ++state.generation;
    return;
  }
  const uint64_t generation = state.generation;
  const std::function<bool()> blocked = [&state, generation] { return state.generation == generation; };
  running->blocked = &blocked;
  leave(false);
}

Thread& self() { return running->thread; }

uint32_t add(uint32_t* number, uint32_t x) { return __atomic_fetch_add(number, x, __ATOMIC_RELAXED); }
void fence() {}

void run(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel) {
  static std::vector<std::unique_ptr<Fiber>> pool;
  while (pool.size() < kResidentBlocks * threads) pool.push_back(std::make_unique<Fiber>());
  body = &kernel;
  std::mt19937 random(settings().seed);
  std::vector<uint32_t> order(blocks);
  for (uint32_t b = 0; b < blocks; ++b) order[b] = b;
  if (settings().seed) std::shuffle(order.begin(), order.end(), random);
  for (size_t first = 0; first < order.size(); first += kResidentBlocks) {
    std::vector<std::unique_ptr<Block>> resident;
    std::vector<Fiber*> fibers;
    for (size_t b = first; b < std::min(order.size(), first + kResidentBlocks); ++b) {
      resident.push_back(std::make_unique<Block>(threads));
      resident.back()->memory.assign(kSharedSize, 0xa5);
      for (uint32_t t = 0; t < threads; ++t) {
        Fiber& fiber = *pool[fibers.size()];
        fiber.thread = {t, order[b], blocks, resident.back().get()};
        start(fiber);
        fibers.push_back(&fiber);
      }
    }
    run_to_the_end(fibers, random);
  }
}

}  // namespace fastclip_shim

#endif
