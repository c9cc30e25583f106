// SPDX-License-Identifier: BSD-3-Clause
// Checks of the loops that read, against sums and counts computed element by element in double precision.

#pragma once

#include "contents.h"
#include "report.h"

namespace check {

constexpr const char* kNormNames[] = {"1", "2", "inf"};

struct Reference {
  double sum[2] = {0, 0};  // of |x| and of x * x, over the finite elements
  double largest = 0;
  int64_t nans = 0;
  int64_t infs = 0;
};

inline Reference reduce_naively(const Format& format, const Elements& elements) {
  Reference reference;
  for (const uint64_t bits : elements) {
    if (format.is_nan(bits)) ++reference.nans;
    if (format.is_inf(bits)) ++reference.infs;
    if (!format.is_finite(bits)) continue;
    const double magnitude = std::fabs(decode(format, bits));
    reference.sum[fastclip::kNorm1] += magnitude;
    reference.sum[fastclip::kNorm2] += magnitude * magnitude;
    reference.largest = std::max(reference.largest, magnitude);
  }
  return reference;
}

struct Expected {
  double value;
  double tolerance;  // relative
};

inline Expected expect(const Format& format, const Content& content, const Reference& reference,
                       fastclip::Norm norm, bool finite_only) {
  if (!finite_only && reference.nans) return {std::numeric_limits<double>::quiet_NaN(), 0};
  if (!finite_only && reference.infs) return {std::numeric_limits<double>::infinity(), 0};
  if (norm == fastclip::kNormInf) return {reference.largest, 0};
  const double sum = reference.sum[norm];
  const double largest_term =
      norm == fastclip::kNorm1 ? reference.largest : reference.largest * reference.largest;
  // What float32 can represent is summed in float32, all else in float64, where the two sums differ by at
  // most one rounding per element. Near kTinySum, 2^-87, either is accepted.
  const bool in_float64 = format.dtype == fastclip::kFloat64 || reference.nans + reference.infs > 0 ||
                          largest_term > std::numeric_limits<float>::max() ||
                          (norm == fastclip::kNorm2 && sum < 0x1p-88);
  if (in_float64) return {sum, std::ldexp(static_cast<double>(content.bits.size()), -52)};
  // A lane rounds at most 32 times, each by 2^-24, before it is added to its float64 lane.
  return {sum, content.worst_rounding ? 33 * 0x1p-24 : 1e-6};
}

inline bool agrees(double value, const Expected& expected) {
  if (std::isnan(expected.value)) return std::isnan(value);
  if (value == expected.value) return true;
  if (std::isinf(expected.value)) return false;
  return std::fabs(value - expected.value) <= expected.tolerance * expected.value;
}

inline bool same_bits(const fastclip::PartialStats& a, const fastclip::PartialStats& b) {
  return bit_cast<uint64_t>(a.value) == bit_cast<uint64_t>(b.value) && a.nan_count == b.nan_count &&
         a.inf_count == b.inf_count;
}

inline std::string describe(const fastclip::PartialStats& partial) {
  char text[128];
  std::snprintf(text, sizeof text, "%.17g (%s), %lld NaN, %lld Inf", partial.value,
                hex(bit_cast<uint64_t>(partial.value)).c_str(), static_cast<long long>(partial.nan_count),
                static_cast<long long>(partial.inf_count));
  return text;
}

inline std::string describe_run(const Format& format, const Content& content, int offset) {
  return std::string(format.name) + " '" + content.name + "' size " + std::to_string(content.bits.size()) +
         " offset " + std::to_string(offset);
}

inline fastclip::PartialStats call_reduce(const fastclip::Loops& loops, const Format& format, GuardedRun& run,
                                          int64_t size, int norm, bool finite_only) {
  fastclip::PartialStats partial{-1, -1, -1};
  loops.reduce[format.dtype][norm](run.data(), size, finite_only, &partial);
  return partial;
}

// Checks all reductions of one content; results at later offsets must equal those at the first.
class ReduceCheck {
 public:
  ReduceCheck(const fastclip::Loops& loops, const Format& format, const Content& content, Report& report)
      : loops_(loops),
        format_(format),
        content_(content),
        reference_(reduce_naively(format, content.bits)),
        report_(report) {}

  void at(int offset) {
    const int64_t size = content_.bits.size();
    GuardedRun run(format_, content_.bits, offset);
    for (int norm = 0; norm < fastclip::kNumNorms; ++norm) {
      for (const bool finite_only : {false, true}) {
        const fastclip::PartialStats partial = call_reduce(loops_, format_, run, size, norm, finite_only);
        compare(partial, static_cast<fastclip::Norm>(norm), finite_only, offset);
      }
    }
    report_.check(run.guards_intact() && run.holds(content_.bits),
                  [&] { return describe_run(format_, content_, offset) + ": reduce wrote"; });
    first_offset_ = false;
  }

 private:
  void compare(const fastclip::PartialStats& partial, fastclip::Norm norm, bool finite_only, int offset) {
    const Expected expected = expect(format_, content_, reference_, norm, finite_only);
    const auto failure = [&](const std::string& wanted) {
      return describe_run(format_, content_, offset) + " norm " + kNormNames[norm] +
             (finite_only ? " finite_only" : "") + ": expected " + wanted + ", but got " + describe(partial);
    };
    const bool counts = partial.nan_count == reference_.nans && partial.inf_count == reference_.infs;
    report_.check(counts && agrees(partial.value, expected),
                  [&] { return failure(describe({expected.value, reference_.nans, reference_.infs})); });
    fastclip::PartialStats& first = first_[norm][finite_only];
    if (first_offset_) {
      first = partial;
      report_.mix(bit_cast<uint64_t>(partial.value));
      report_.mix(partial.nan_count * 65536 + partial.inf_count);
    } else {
      report_.check(same_bits(partial, first), [&] { return failure("as elsewhere " + describe(first)); });
    }
  }

  const fastclip::Loops& loops_;
  const Format& format_;
  const Content& content_;
  const Reference reference_;
  Report& report_;
  bool first_offset_ = true;
  fastclip::PartialStats first_[fastclip::kNumNorms][2];
};

// Checks the conversions of the loops that read, with each bit pattern as a run of one element.
inline void check_each_pattern_alone(const fastclip::Loops& loops, const Format& format, Report& report) {
  for (uint64_t bits = 0; bits < 65536; ++bits) {
    const Content content{"pattern " + hex(bits), {bits}};
    ReduceCheck(loops, format, content, report).at(0);
  }
}

}  // namespace check
