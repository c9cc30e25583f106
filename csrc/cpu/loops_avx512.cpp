// SPDX-License-Identifier: BSD-3-Clause
// The loops for CPUs with AVX-512 (F, BW, DQ, VL).

#include "loops.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "target_begin_avx512.h"

namespace {

struct Isa {
  static constexpr int kFloats = 16;
  typedef float Floats __attribute__((vector_size(64)));
  typedef int32_t Ints __attribute__((vector_size(64)));
  typedef double Doubles __attribute__((vector_size(64)));
  typedef int64_t Longs __attribute__((vector_size(64)));
  typedef int16_t Shorts __attribute__((vector_size(64)));

  static Floats load_bfloat16(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
  }
  static Floats load_float16(const uint16_t* p) {
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static __m512i rounded(Floats x) {
    const Ints bits = (Ints)x;
    return (__m512i)(bits + 0x7fff + (bits >> 16 & 1));
  }
  static void store_bfloat16(uint16_t* p, Floats low, Floats high) {
    // Selects the upper half of every float, first of `low`, then of `high`.
    const Shorts odd_halves = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                               33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i packed = _mm512_permutex2var_epi16(rounded(low), (__m512i)odd_halves, rounded(high));
    _mm512_storeu_si512(p, packed);
  }
  static void store_float16(uint16_t* p, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static Doubles widen_low(Floats x) { return (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x)); }
  static Doubles widen_high(Floats x) {
    return (Doubles)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
  }
};

}  // namespace

#include "loops_body.h"

const fastclip::Loops fastclip::kAvx512Loops = fastclip::make_loops("avx512");

#include "target_end.h"
#endif
