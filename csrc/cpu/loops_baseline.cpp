// SPDX-License-Identifier: BSD-3-Clause
// The loops for any CPU: SSE2 on x86-64, NEON on aarch64, elsewhere what the compiler makes of its vectors.

#include "loops.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

struct Isa {
  static constexpr int kFloats = 4;
  typedef float Floats __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  typedef double Doubles __attribute__((vector_size(16)));
  typedef int64_t Longs __attribute__((vector_size(16)));
  typedef int16_t Shorts __attribute__((vector_size(16)));

  static Ints load_halves(const uint16_t* p) {
    typedef uint16_t Halves __attribute__((vector_size(8)));
    Halves half;
    __builtin_memcpy(&half, p, sizeof half);
    return __builtin_convertvector(half, Ints);
  }
  static void store_halves(uint16_t* p, Ints x) {
    typedef uint16_t Halves __attribute__((vector_size(8)));
    const Halves half = __builtin_convertvector(x, Halves);
    __builtin_memcpy(p, &half, sizeof half);
  }

  static Floats load_bfloat16(const uint16_t* p) { return (Floats)(load_halves(p) << 16); }
  static Ints rounded(Floats x) {
    const Ints bits = (Ints)x;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16 & 0xffff;
  }
  static void store_bfloat16(uint16_t* p, Floats low, Floats high) {
    store_halves(p, rounded(low));
    store_halves(p + kFloats, rounded(high));
  }

#if defined(__aarch64__)
  static Floats load_float16(const uint16_t* p) {
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
  }
  static void store_float16(uint16_t* p, Floats x) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
  }
#else
  // A float16 has 5 exponent bits with bias 15 and 10 mantissa bits; a float32 has 8, 127 and 23.
  static Floats load_float16(const uint16_t* p) {
    const Ints half = load_halves(p);
    const Ints exponent = half & 0x7c00;
    const Ints shifted = (half & 0x7fff) << 13;
    const Ints normal = shifted + ((127 - 15) << 23);
    const Ints nonfinite = shifted | 0x7f800000;
    // A subnormal is its mantissa times 2^-24: exact, and independent of the flush-to-zero mode.
    const Ints subnormal = (Ints)(__builtin_convertvector(half & 0x3ff, Floats) * 0x1p-24f);
    const Ints magnitude = exponent == 0 ? subnormal : exponent == 0x7c00 ? nonfinite : normal;
    return (Floats)(magnitude | (half & 0x8000) << 16);
  }
  // A NaN keeps the upper bits of its payload and becomes quiet, as with the conversion instructions of CPUs.
  static void store_float16(uint16_t* p, Floats x) {
    const Ints bits = (Ints)x & 0x7fffffff;
    const Ints sign = ((Ints)x >> 16) & 0x8000;
    // Adding 0.5 aligns the mantissa so that the unit of the sum is 2^-24, that of a float16 subnormal.
    const Ints subnormal = (Ints)((Floats)bits + 0.5f) - 0x3f000000;
    const Ints normal = (bits - ((127 - 15) << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    const Ints finite = bits < 0x38800000 ? subnormal : normal;          // 2^-14
    const Ints limited = bits >= 0x477ff000 ? Ints{} + 0x7c00 : finite;  // 65520 rounds to Inf
    const Ints nan = 0x7e00 | (bits >> 13 & 0x3ff);
    store_halves(p, (bits > 0x7f800000 ? nan : limited) | sign);
  }
#endif

  static Doubles widen_low(Floats x) { return Doubles{x[0], x[1]}; }
  static Doubles widen_high(Floats x) { return Doubles{x[2], x[3]}; }
};

}  // namespace

#include "loops_body.h"

const fastclip::Loops fastclip::kBaselineLoops = fastclip::make_loops("baseline");
