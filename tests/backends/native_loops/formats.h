// SPDX-License-Identifier: BSD-3-Clause
// Straightforward, slow implementations of the four element formats, which the loops are compared with. An
// element is the low bits of a uint64_t; a value is a double, which represents all formats exactly.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "loops.h"

namespace check {

using Elements = std::vector<uint64_t>;

struct Format {
  const char* name;
  fastclip::DType dtype;
  int bytes;
  int mantissa_bits;
  int exponent_bits;

  uint64_t sign() const { return uint64_t{1} << (8 * bytes - 1); }
  uint64_t infinity() const { return ((uint64_t{1} << exponent_bits) - 1) << mantissa_bits; }
  uint64_t quiet() const { return uint64_t{1} << (mantissa_bits - 1); }
  uint64_t largest() const { return infinity() - 1; }
  uint64_t smallest_normal() const { return uint64_t{1} << mantissa_bits; }
  // The smallest subnormal is 2 to this power.
  int unit_exponent() const { return 2 - (1 << (exponent_bits - 1)) - mantissa_bits; }

  bool is_nan(uint64_t bits) const { return (bits & ~sign()) > infinity(); }
  bool is_inf(uint64_t bits) const { return (bits & ~sign()) == infinity(); }
  bool is_finite(uint64_t bits) const { return (bits & ~sign()) < infinity(); }
};

constexpr Format kFormats[] = {{"float32", fastclip::kFloat32, 4, 23, 8},
                               {"bfloat16", fastclip::kBFloat16, 2, 7, 8},
                               {"float16", fastclip::kFloat16, 2, 10, 5},
                               {"float64", fastclip::kFloat64, 8, 52, 11}};

template <class Value, class Bits>
Value bit_cast(Bits bits) {
  static_assert(sizeof(Value) == sizeof(Bits));
  Value value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// float32 and float64 are float and double.
inline double decode(const Format& format, uint64_t bits) {
  if (format.bytes == 4) return bit_cast<float>(static_cast<uint32_t>(bits));
  if (format.bytes == 8) return bit_cast<double>(bits);
  if (format.is_nan(bits)) return std::numeric_limits<double>::quiet_NaN();
  const uint64_t magnitude = bits & ~format.sign();
  double value = std::numeric_limits<double>::infinity();
  if (format.is_finite(bits)) {
    const int exponent = static_cast<int>(magnitude >> format.mantissa_bits);
    const uint64_t leading = exponent == 0 ? 0 : format.smallest_normal();
    const uint64_t mantissa = magnitude & (format.smallest_normal() - 1);
    value = std::ldexp(static_cast<double>(leading + mantissa),
                       format.unit_exponent() + std::max(exponent, 1) - 1);
  }
  return bits & format.sign() ? -value : value;
}

// Rounds to nearest, ties to even, beyond the largest finite number to infinity. Not for NaN.
inline uint64_t encode(const Format& format, double value) {
  if (format.bytes == 4) return bit_cast<uint32_t>(static_cast<float>(value));
  if (format.bytes == 8) return bit_cast<uint64_t>(value);
  const uint64_t sign = std::signbit(value) ? format.sign() : 0;
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  if (std::isinf(magnitude)) return sign | format.infinity();
  // A whole number of units in the last place. A mantissa that rounds up to 2 carries into the exponent.
  const int exponent = std::max(std::ilogb(magnitude) - format.mantissa_bits, format.unit_exponent());
  const double units = std::nearbyint(std::ldexp(magnitude, -exponent));
  const uint64_t above_smallest = static_cast<uint64_t>(exponent - format.unit_exponent());
  const uint64_t bits = (above_smallest << format.mantissa_bits) + static_cast<uint64_t>(units);
  return sign | std::min(bits, format.infinity());
}

}  // namespace check
