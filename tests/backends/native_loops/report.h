// SPDX-License-Identifier: BSD-3-Clause
// Counts of checks and failures with a digest of all results; runs of elements between guards.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "formats.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size)
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

namespace check {

class Report {
 public:
  // `describe` is called for a failure only.
  template <class Describe>
  void check(bool passed, Describe describe) {
    ++checks_;
    if (passed) return;
    if (++failures_ <= 20) std::printf("FAILED %s\n", describe().c_str());
  }
  // FNV-1a over words in place of bytes, with the high bits of the product folded back.
  void mix(uint64_t word) {
    digest_ = (digest_ ^ word) * 0x100000001b3;
    digest_ ^= digest_ >> 32;
  }
  int64_t checks() const { return checks_; }
  int64_t failures() const { return failures_; }
  uint64_t digest() const { return digest_; }

 private:
  int64_t checks_ = 0;
  int64_t failures_ = 0;
  uint64_t digest_ = 0xcbf29ce484222325;
};

inline std::string hex(uint64_t bits) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(bits));
  return text;
}

// Stores the low bytes of a word. Constant sizes compile to single instructions; with a variable size nearly
// all the time of this program was spent in copies.
inline void store(void* memory, int bytes, uint64_t bits) {
  switch (bytes) {
    case 2: std::memcpy(memory, &bits, 2); break;
    case 4: std::memcpy(memory, &bits, 4); break;
    default: std::memcpy(memory, &bits, 8);
  }
}

inline uint64_t load(const void* memory, int bytes) {
  uint64_t bits = 0;
  switch (bytes) {
    case 2: std::memcpy(&bits, memory, 2); break;
    case 4: std::memcpy(&bits, memory, 4); break;
    default: std::memcpy(&bits, memory, 8);
  }
  return bits;
}

// A run of elements that starts `offset` elements after a cache line, between two guards. Reads of a guard
// return NaN or a large number, and writes to it are detected; AddressSanitizer reports both.
class GuardedRun {
 public:
  GuardedRun(const Format& format, const Elements& elements, int offset)
      : bytes_(format.bytes), size_(elements.size()), front_((kGuard + offset) * format.bytes) {
    const int64_t total = (front_ + (size_ + kGuard) * bytes_ + kLine - 1) / kLine * kLine;
    memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(kLine, total)));
    if (!memory_) std::abort();
    std::memset(memory_.get(), kGuardByte, total);
    for (int64_t i = 0; i < size_; ++i) store(data() + i * bytes_, bytes_, elements[i]);
    back_ = total - front_ - size_ * bytes_;
    ASAN_POISON_MEMORY_REGION(memory_.get(), front_);
    ASAN_POISON_MEMORY_REGION(data() + size_ * bytes_, back_);
  }
  ~GuardedRun() { open(); }

  unsigned char* data() { return memory_.get() + front_; }

  uint64_t operator[](int64_t i) { return load(data() + i * bytes_, bytes_); }

  bool holds(const Elements& elements) {
    for (int64_t i = 0; i < size_; ++i) {
      if ((*this)[i] != elements[i]) return false;
    }
    return true;
  }

  bool guards_intact() {
    open();
    const auto intact = [](const unsigned char* begin, int64_t size) {
      return std::all_of(begin, begin + size, [](unsigned char byte) { return byte == kGuardByte; });
    };
    return intact(memory_.get(), front_) && intact(data() + size_ * bytes_, back_);
  }

 private:
  static constexpr int kLine = 64;
  static constexpr int kGuard = 64;                  // elements: two groups of the loops
  static constexpr unsigned char kGuardByte = 0x7e;  // 0x7e7e, 0x7e7e7e7e and so on
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  void open() { ASAN_UNPOISON_MEMORY_REGION(memory_.get(), front_ + size_ * bytes_ + back_); }

  int bytes_;
  int64_t size_;
  int64_t front_;
  int64_t back_ = 0;
  std::unique_ptr<unsigned char, Free> memory_;
};

}  // namespace check
