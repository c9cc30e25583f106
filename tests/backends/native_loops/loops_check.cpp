// SPDX-License-Identifier: BSD-3-Clause
// Checks the loops of one instruction set, named by the first argument, without torch. Prints how much was
// checked and a digest of all results, which must be the same for all instruction sets and compilers.
// Exits with 0 if all checks pass, 1 if not, 77 if this CPU lacks the instruction set.

#include "check_update.h"
#include "flush_to_zero.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace check {
namespace {

using fastclip::Loops;

const std::vector<int> kAllOffsets = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

void check_content(const Loops& loops, const Format& format, const Content& content,
                   const std::vector<int>& offsets, Report& report) {
  ReduceCheck reduce(loops, format, content, report);
  for (const int offset : offsets) reduce.at(offset);
  check_scale(loops, format, content, 0.3, offsets, report);
  // The normal content has no element beyond 8: clamp leaves a block alone, or clamps the one special
  // element.
  check_clamp(loops, format, content, 8, offsets, report);
}

// The memory of an empty tensor is a null pointer.
void check_nothing(const Loops& loops, const Format& format, Report& report) {
  for (const auto reduce : loops.reduce[format.dtype]) {
    fastclip::PartialStats partial{-1, -1, -1};
    reduce(nullptr, 0, false, &partial);
    report.check(same_bits(partial, {0, 0, 0}), [] { return std::string("reduce of no element"); });
  }
  loops.scale[format.dtype](nullptr, 0, 2, true);
  loops.clamp[format.dtype](nullptr, 0, -1);
}

void check_sizes(const Loops& loops, const Format& format, Report& report) {
  for (const int64_t size : {0, 1, 2, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 4097, 32767, 32768}) {
    int next_offset = 0;
    for (const Content& content : all_contents(format, size)) {
      // For long runs the offset matters less than the content: only the first content tries all offsets.
      const bool all = size <= 1025 || next_offset == 0;
      check_content(loops, format, content, all ? kAllOffsets : std::vector<int>{next_offset % 16}, report);
      ++next_offset;
    }
  }
}

// Puts a special element in every lane, in complete and incomplete groups, and in a second block of 1024.
void check_positions(const Loops& loops, const Format& format, Report& report) {
  for (const int64_t size : {33, 95, 1055}) {
    for (int64_t position = 0; position < size; ++position) {
      if (size == 1055 && position < 1024) continue;
      for (const Content& content : with_one_special(format, size, position)) {
        check_content(loops, format, content, {static_cast<int>(position % 16)}, report);
      }
    }
  }
}

// Checks all 65,536 bit patterns of the 2-byte formats and random patterns of the others.
void check_patterns(const Loops& loops, const Format& format, Report& report) {
  Random random(1);
  const uint64_t mask = format.sign() | (format.sign() - 1);
  const Content content = format.bytes == 2
                              ? fill("all patterns", 65536, [](int64_t i) { return i; })
                              : fill("random patterns", 8192, [&](int64_t) { return random.next() & mask; });
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<int> offsets = {0};
  // 1 + 2^-8 and 1 + 2^-11 put results halfway between two bfloat16 or float16 numbers.
  for (const double factor : {1.0, 1.0000001, 0.9999999, 1 + 0x1p-8, 1 + 0x1p-11, 0.5, 1 / 3.0, 3.0, 1e-3,
                              1e-20, 1e30, 1e-50, 1e300, 0.0, -0.0, -1.0, infinity, nan}) {
    check_scale(loops, format, content, factor, offsets, report);
  }
  for (const double limit : {1.0, 0.1, 1e-6, 1e-40, 65519.0, 65520.0, 1e300, 0.0, -1e-10, -1.0, infinity}) {
    check_clamp(loops, format, content, limit, offsets, report);
  }
  if (format.bytes == 2) check_each_pattern_alone(loops, format, report);
}

// Checks sums whose terms are below the normal float32 numbers, with and without flush-to-zero.
void check_underflow(const Loops& loops, const Format& format, Report& report) {
  for (const int64_t size : {1, 33, 1025, 32768}) {
    // Squares of float16 do not underflow, but its subnormal numbers must survive flush-to-zero.
    std::vector<Content> contents;
    if (format.dtype == fastclip::kFloat16) {
      contents = all_contents(format, size);
    } else {
      for (int k = 38; k < 70; ++k) contents.push_back(near_underflow(format, size, k));
    }
    for (const Content& content : contents) {
      ReduceCheck(loops, format, content, report).at(0);
      ReduceCheck flushed(loops, format, content, report);
      const FlushToZero flush;
      flushed.at(0);
    }
  }
}

int run(const Loops& loops) {
  Report report;
  for (const Format& format : kFormats) {
    check_nothing(loops, format, report);
    check_sizes(loops, format, report);
    check_positions(loops, format, report);
    check_patterns(loops, format, report);
    if (format.dtype != fastclip::kFloat64) check_underflow(loops, format, report);
  }
  std::printf("%lld checks, %lld failures\n", static_cast<long long>(report.checks()),
              static_cast<long long>(report.failures()));
  std::printf("digest %016llx\n", static_cast<unsigned long long>(report.digest()));
  return report.failures() == 0 ? 0 : 1;
}

// Returns the loops of that name, or null if this CPU cannot run them.
const Loops* find_loops(const std::string& name) {
  if (name == "baseline") return &fastclip::kBaselineLoops;
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned eax, ebx, ecx = 0, edx;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);  // older versions of Clang have no name for F16C
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (ecx & bit_F16C);
  if (name == "avx2" && avx2) return &fastclip::kAvx2Loops;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (name == "avx512" && avx2 && avx512) return &fastclip::kAvx512Loops;
#endif
  return nullptr;
}

}  // namespace
}  // namespace check

int main(int argument_count, char** arguments) {
  const std::string name = argument_count == 2 ? arguments[1] : "";
  const fastclip::Loops* loops = check::find_loops(name);
  if (!loops) {
    std::printf("this CPU has no '%s'\n", name.c_str());
    return 77;
  }
  return check::run(*loops);
}
