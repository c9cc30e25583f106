// SPDX-License-Identifier: BSD-3-Clause
// The contents of the checked runs. The bits are the same on every machine: no library function is called
// whose results differ between machines.

#pragma once

#include <string>

#include "formats.h"

namespace check {

struct Content {
  std::string name;
  Elements bits;
  // All roundings of float32 sums go in the same direction here.
  bool worst_rounding = false;
};

// The generator splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double normal() {  // approximated by a sum of 12 uniform numbers
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

 private:
  uint64_t state_;
};

// At most one generator call per statement, as compilers differ in the evaluation order of operands.
inline uint64_t random_sign(const Format& format, Random& random) {
  return random.next() & 1 ? format.sign() : 0;
}

// Any NaN, including signaling ones.
inline uint64_t random_nan(const Format& format, Random& random) {
  const uint64_t payload = 1 + random.next() % (format.smallest_normal() - 1);
  return format.infinity() | payload | random_sign(format, random);
}

// float16 cannot represent 1e20 and 1e-25; its largest and smallest numbers are used instead.
inline double huge_value(const Format& format) { return format.dtype == fastclip::kFloat16 ? 65504 : 1e20; }
inline double tiny_value(const Format& format) {
  return format.dtype == fastclip::kFloat16 ? 0x1p-24 : 1e-25;
}

template <class Element>
Content fill(std::string name, int64_t size, Element element) {
  Content content{std::move(name), Elements(size)};
  for (int64_t i = 0; i < size; ++i) content.bits[i] = element(i);
  return content;
}

// The first element of every lane is 1; the rest are too small to change a float32 sum near 1. A sum that is
// not added to float64 in time loses all of them.
inline Content absorbed(const Format& format, const char* name, double rest, int64_t size) {
  Content content = fill(name, size, [&](int64_t i) { return encode(format, i < 32 ? 1.0 : rest); });
  content.worst_rounding = true;
  return content;
}

inline std::vector<Content> numbers(const Format& format, int64_t size, Random& random) {
  const int least = format.dtype == fastclip::kFloat16 ? -24 : -60;
  const int most = format.dtype == fastclip::kFloat16 ? 15 : 60;
  const uint64_t ends[] = {format.largest(), format.smallest_normal(), format.smallest_normal() - 1, 1};
  return {
      fill("normal", size, [&](int64_t) { return encode(format, random.normal()); }),
      // Exponents this far apart make the order of every addition visible in the last bit.
      fill("wide", size,
           [&](int64_t) {
             const int exponent = least + static_cast<int>(random.next() % (most - least + 1));
             const double magnitude = std::ldexp(1 + random.uniform() / 2, exponent);
             return encode(format, magnitude) | random_sign(format, random);
           }),
      fill("zeros", size, [&](int64_t) { return 0; }),
      fill("negative zeros", size, [&](int64_t) { return format.sign(); }),
      fill("subnormal", size,
           [&](int64_t) {
             const uint64_t mantissa = random.next() % format.smallest_normal();
             return mantissa | random_sign(format, random);
           }),
      fill("huge", size, [&](int64_t i) { return encode(format, i % 3 ? huge_value(format) : -1.0); }),
      fill("tiny", size,
           [&](int64_t) { return encode(format, tiny_value(format)) | random_sign(format, random); }),
      fill("extremes", size, [&](int64_t i) { return ends[i % 4] | (i % 8 < 4 ? 0 : format.sign()); }),
      absorbed(format, "absorbed by norm 1", 0x1p-24, size),
      absorbed(format, "absorbed by norm 2", 0x1p-12, size),
  };
}

inline std::vector<Content> nonfinites(const Format& format, int64_t size, Random& random) {
  return {
      fill("all NaN", size, [&](int64_t) { return random_nan(format, random); }),
      fill("all Inf", size, [&](int64_t) { return format.infinity(); }),
      fill("all -Inf", size, [&](int64_t) { return format.infinity() | format.sign(); }),
      fill("NaN, Inf and numbers", size,
           [&](int64_t) {
             const uint64_t sign = random_sign(format, random);
             switch (random.next() % 4) {
               case 0: return random_nan(format, random);
               case 1: return format.infinity() | sign;
               default: return encode(format, random.normal());
             }
           }),
  };
}

inline std::vector<Content> all_contents(const Format& format, int64_t size) {
  Random random(size * 8 + format.dtype);
  std::vector<Content> contents = numbers(format, size, random);
  for (Content& content : nonfinites(format, size, random)) contents.push_back(std::move(content));
  return contents;
}

// One special element among ordinary ones, or among zeros, at `position`.
inline std::vector<Content> with_one_special(const Format& format, int64_t size, int64_t position) {
  Random random(position);
  const Content base = fill("", size, [&](int64_t) { return encode(format, random.normal()); });
  const std::string at = " at " + std::to_string(position);
  const auto place = [&](const char* name, const Elements& others, uint64_t special) {
    Content content{name + at, others};
    content.bits[position] = special;
    return content;
  };
  const double overflowing = format.dtype == fastclip::kFloat64 ? 1e200 : huge_value(format);
  return {
      place("NaN", base.bits, random_nan(format, random)),
      place("the least NaN", base.bits, format.infinity() + 1),
      place("Inf", base.bits, format.infinity()),
      place("-Inf", base.bits, format.infinity() | format.sign()),
      place("huge", base.bits, encode(format, overflowing)),
      place("-huge", base.bits, encode(format, -overflowing)),
      place("tiny among zeros", Elements(size), encode(format, tiny_value(format))),
  };
}

// One element of 2^-k, the rest as large as they can be with a square below the normal float32 numbers.
inline Content near_underflow(const Format& format, int64_t size, int k) {
  Content content = fill("2^-" + std::to_string(k) + " among squares that underflow", size, [&](int64_t i) {
    return encode(format, i == size / 2 ? std::ldexp(1.0, -k) : 0x1.fep-64);
  });
  content.worst_rounding = true;
  return content;
}

}  // namespace check
