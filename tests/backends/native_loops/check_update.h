// SPDX-License-Identifier: BSD-3-Clause
// Checks of the loops that write, bit for bit against the arithmetic of single elements.

#pragma once

#include "check_reduce.h"

namespace check {

// Which results are correct. The bits of a NaN depend on the processor where an operation creates it (Inf *
// 0, whose sign differs between x86 and Arm), and on the compiler's order of operands for NaN * NaN.
enum class Rule : char { kExact, kAnyNan, kNanOrQuietNan };

struct Result {
  uint64_t bits;
  Rule rule = Rule::kExact;
};

inline Result scale_naively(const Format& format, uint64_t bits, double factor, bool zero_nonfinite) {
  if (zero_nonfinite && !format.is_finite(bits)) return {0};
  if (format.is_nan(bits)) {
    if (std::isnan(factor)) return {0, Rule::kAnyNan};
    return {bits | format.quiet()};
  }
  const double x = decode(format, bits);
  const bool in_float64 = format.dtype == fastclip::kFloat64;
  const double product = in_float64 ? x * factor : static_cast<float>(x) * static_cast<float>(factor);
  if (!std::isnan(product)) return {encode(format, product)};
  if (std::isnan(factor)) return {format.infinity() | format.quiet()};
  return {0, Rule::kAnyNan};
}

inline Result clamp_naively(const Format& format, uint64_t bits, double limit) {
  // Conversion of a float16 makes a NaN quiet if an element of its block is clamped.
  const bool converted = format.dtype == fastclip::kFloat16;
  if (format.is_nan(bits)) return {bits, converted ? Rule::kNanOrQuietNan : Rule::kExact};
  const bool in_float64 = format.dtype == fastclip::kFloat64;
  const uint64_t high_bits = encode(format, in_float64 ? limit : static_cast<float>(limit));
  const double high = decode(format, high_bits), x = decode(format, bits);
  const bool too_low = x < -high;
  if (too_low && -high > high) return {high_bits};
  if (too_low) return {high_bits ^ format.sign()};
  return {x > high ? high_bits : bits};
}

inline bool follows(const Format& format, uint64_t bits, const Result& expected) {
  switch (expected.rule) {
    case Rule::kExact: return bits == expected.bits;
    case Rule::kAnyNan: return format.is_nan(bits);
    case Rule::kNanOrQuietNan: return bits == expected.bits || bits == (expected.bits | format.quiet());
  }
  return false;
}

// Checks one operation on one content; results at later offsets must equal those at the first.
class UpdateCheck {
 public:
  // `compute(bits)` returns the expected result of one element; `update(data)` calls the loop.
  template <class Compute>
  UpdateCheck(const Format& format, const Content& content, std::string operation, Compute compute,
              Report& report)
      : format_(format), content_(content), operation_(std::move(operation)), report_(report) {
    expected_.reserve(content.bits.size());
    for (const uint64_t bits : content.bits) expected_.push_back(compute(bits));
  }

  template <class Update>
  void at(int offset, Update update) {
    GuardedRun run(format_, content_.bits, offset);
    update(run.data());
    const auto place = [&] { return describe_run(format_, content_, offset) + " " + operation_; };
    report_.check(run.guards_intact(), [&] { return place() + ": wrote outside of the run"; });
    const size_t bytes = expected_.size() * format_.bytes;
    if (!first_.empty()) {
      const bool same = std::memcmp(run.data(), first_.data(), bytes) == 0;
      report_.check(same, [&] { return place() + ": other results than at the first offset"; });
      return;
    }
    first_.assign(run.data(), run.data() + bytes);
    for (size_t i = 0; i < expected_.size(); ++i) {
      const Result& expected = expected_[i];
      const uint64_t bits = run[i];
      report_.check(follows(format_, bits, expected), [&] {
        return place() + ": element " + std::to_string(i) + " was " + hex(content_.bits[i]) + ", expected " +
               (expected.rule == Rule::kAnyNan ? "NaN" : hex(expected.bits)) + ", but got " + hex(bits);
      });
      report_.mix(expected.rule == Rule::kAnyNan ? 0 : bits);
    }
  }

 private:
  const Format& format_;
  const Content& content_;
  const std::string operation_;
  std::vector<Result> expected_;
  Report& report_;
  std::vector<unsigned char> first_;
};

template <class Offsets>
void check_scale(const fastclip::Loops& loops, const Format& format, const Content& content, double factor,
                 const Offsets& offsets, Report& report) {
  const int64_t size = content.bits.size();
  for (const bool zero_nonfinite : {false, true}) {
    char operation[64];
    std::snprintf(operation, sizeof operation, "scale by %.9g%s", factor, zero_nonfinite ? " zeroing" : "");
    UpdateCheck check(
        format, content, operation,
        [&](uint64_t bits) { return scale_naively(format, bits, factor, zero_nonfinite); }, report);
    for (const int offset : offsets) {
      check.at(offset, [&](void* data) { loops.scale[format.dtype](data, size, factor, zero_nonfinite); });
    }
  }
}

template <class Offsets>
void check_clamp(const fastclip::Loops& loops, const Format& format, const Content& content, double limit,
                 const Offsets& offsets, Report& report) {
  const int64_t size = content.bits.size();
  char operation[64];
  std::snprintf(operation, sizeof operation, "clamp to %.9g", limit);
  UpdateCheck check(
      format, content, operation, [&](uint64_t bits) { return clamp_naively(format, bits, limit); }, report);
  for (const int offset : offsets) {
    check.at(offset, [&](void* data) { loops.clamp[format.dtype](data, size, limit); });
  }
}

}  // namespace check
