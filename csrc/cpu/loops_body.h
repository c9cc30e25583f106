// SPDX-License-Identifier: BSD-3-Clause
// The loops, written in terms of the primitives of `Isa`. Included once by each loops_<isa>.cpp, after it has
// defined `Isa` in an anonymous namespace; has no include guard and includes only the other parts of the
// loops.
//
// `Isa` defines: kFloats, the floats in a register; Floats, Ints, Doubles, Longs, Shorts, vectors of that
// register size; load_bfloat16, load_float16, store_bfloat16 (two registers), store_float16; widen_low,
// widen_high. Stores round to nearest, ties to even; a NaN given to store_bfloat16 must have zeros in its
// low 16 bits, as a NaN read from a bfloat16 has.

namespace fastclip {
namespace {

using Floats = Isa::Floats;
using Ints = Isa::Ints;
using Doubles = Isa::Doubles;
using Longs = Isa::Longs;
using Shorts = Isa::Shorts;

constexpr int kLanes = 32;                           // element i is summed in lane i % kLanes
constexpr int kRegisters = kLanes / Isa::kFloats;    // registers that hold one float32 a lane
constexpr int kDoubles = Isa::kFloats / 2;           // doubles in a register
constexpr int kDoubleRegisters = kLanes / kDoubles;  // registers that hold one float64 a lane
// float32 lanes are added to float64 lanes and reset after this many elements. That bounds the relative error
// of a norm below 1e-6 even where every rounding goes the same way: by 15 additions of 2^-24 for p = 1, by
// half of 31 additions and a product for p = 2, of which the root is taken.
template <Norm norm>
constexpr int64_t kFlush = kLanes * (norm == kNorm1 ? 16 : 32);
// A sum of squares below this may have lost a relevant part to underflow in float32: a run of 2^15 elements
// loses at most 2^15 * 2^-126, which is 2^-24 of this sum.
constexpr double kTinySum = 0x1p-87;

constexpr int32_t kAbs32 = 0x7fffffff;
constexpr int32_t kInf32 = 0x7f800000;
constexpr int64_t kAbs64 = 0x7fffffffffffffff;
constexpr int64_t kInf64 = 0x7ff0000000000000;

template <class Vector, class Element>
inline Vector load_vector(const Element* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class Vector, class Element>
inline void store_vector(Element* p, Vector v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <class Vector, class Element>
inline Vector broadcast(Element x) {
  return x - Vector{};  // a sum would turn -0 into +0
}

inline double double_from_bits(int64_t bits) {
  double x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// The element types whose arithmetic is float32.
struct Float32 {
  using Element = float;
  static Floats load(const float* p) { return load_vector<Floats>(p); }
  static void store(float* p, Floats low, Floats high) {
    store_vector(p, low);
    store_vector(p + Isa::kFloats, high);
  }
};
struct BFloat16 {
  using Element = uint16_t;
  static Floats load(const uint16_t* p) { return Isa::load_bfloat16(p); }
  static void store(uint16_t* p, Floats low, Floats high) { Isa::store_bfloat16(p, low, high); }
};
struct Float16 {
  using Element = uint16_t;
  static Floats load(const uint16_t* p) { return Isa::load_float16(p); }
  static void store(uint16_t* p, Floats low, Floats high) {
    Isa::store_float16(p, low);
    Isa::store_float16(p + Isa::kFloats, high);
  }
};

// Calls step(p) for each group of kLanes elements. An incomplete last group is padded with zeros, which do
// not change a sum, a maximum or a count.
template <class Element, class Step>
inline void for_each_group(const Element* p, int64_t size, Step step) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) step(p + i);
  if (i < size) {
    Element padded[kLanes] = {};
    __builtin_memcpy(padded, p + i, (size - i) * sizeof(Element));
    step(padded);
  }
}

// Like for_each_group, for a step that changes the kLanes elements in place.
template <class Element, class Step>
inline void update_each_group(Element* p, int64_t size, Step step) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) step(p + i);
  if (i < size) {
    Element padded[kLanes] = {};
    __builtin_memcpy(padded, p + i, (size - i) * sizeof(Element));
    step(padded);
    __builtin_memcpy(p + i, padded, (size - i) * sizeof(Element));
  }
}

// kLanes float64 accumulators; element i of a group goes to lane i.
struct Lanes {
  Doubles lane[kDoubleRegisters] = {};

  void add(int float_register, Floats x) {
    lane[2 * float_register] += Isa::widen_low(x);
    lane[2 * float_register + 1] += Isa::widen_high(x);
  }
  // Adds the upper half of the lanes to the lower half until one lane is left; the order is part of the
  // result.
  double sum() const {
    double lanes[kLanes];
    __builtin_memcpy(lanes, lane, sizeof lanes);
#pragma GCC unroll 5
    for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }
  double max() const {
    double lanes[kLanes];
    __builtin_memcpy(lanes, lane, sizeof lanes);
    double largest = 0;
    for (double x : lanes) largest = x > largest ? x : largest;
    return largest;
  }
};

template <class Vector>
inline int64_t sum_elements(Vector v) {
  int64_t total = 0;
  for (unsigned i = 0; i < sizeof(v) / sizeof(v[0]); ++i) total += v[i];
  return total;
}

#include "loops_reduce.h"
#include "loops_update.h"

constexpr Loops make_loops(const char* name) {
  return {
      name,
      {{reduce_sum<Float32, kNorm1>, reduce_sum<Float32, kNorm2>, reduce_max<Float32, Ints, int32_t>},
       {reduce_sum<BFloat16, kNorm1>, reduce_sum<BFloat16, kNorm2>, reduce_max<BFloat16, Shorts, int16_t>},
       {reduce_sum<Float16, kNorm1>, reduce_sum<Float16, kNorm2>, reduce_max<Float16, Shorts, int16_t>},
       {reduce_float64<kNorm1>, reduce_float64<kNorm2>, reduce_float64<kNormInf>}},
      {scale<Float32>, scale<BFloat16>, scale<Float16>, scale_float64},
      {clamp<Float32>, clamp<BFloat16>, clamp<Float16>, clamp_float64}};
}

}  // namespace
}  // namespace fastclip
