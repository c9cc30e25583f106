// SPDX-License-Identifier: BSD-3-Clause
// The mode of the processor in which subnormal numbers are zero, as torch.set_flush_denormal(True) sets it.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace check {

// On while it lives. Does nothing on a processor not known here.
class FlushToZero {
 public:
#if defined(__x86_64__)
  FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }  // results, and operands
  ~FlushToZero() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
  FlushToZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | 1 << 24) : "memory");
  }
  ~FlushToZero() { asm volatile("msr fpcr, %0" ::"r"(before_) : "memory"); }
#endif
  FlushToZero(const FlushToZero&) = delete;
  FlushToZero& operator=(const FlushToZero&) = delete;

 private:
  uint64_t before_ = 0;
};

}  // namespace check
