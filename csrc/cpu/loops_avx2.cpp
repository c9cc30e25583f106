// SPDX-License-Identifier: BSD-3-Clause
// The loops for CPUs with AVX2, FMA and F16C.

#include "loops.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "target_begin_avx2.h"

namespace {

struct Isa {
  static constexpr int kFloats = 8;
  typedef float Floats __attribute__((vector_size(32)));
  typedef int32_t Ints __attribute__((vector_size(32)));
  typedef double Doubles __attribute__((vector_size(32)));
  typedef int64_t Longs __attribute__((vector_size(32)));
  typedef int16_t Shorts __attribute__((vector_size(32)));

  static Floats load_bfloat16(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
  }
  static Floats load_float16(const uint16_t* p) {
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static __m256i rounded(Floats x) {
    const Ints bits = (Ints)x;
    return _mm256_srli_epi32((__m256i)(bits + 0x7fff + (bits >> 16 & 1)), 16);
  }
  static void store_bfloat16(uint16_t* p, Floats low, Floats high) {
    // The pack works within 128-bit halves; the permutation restores the order of the quarters.
    const __m256i packed = _mm256_packus_epi32(rounded(low), rounded(high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
  }
  static void store_float16(uint16_t* p, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static Doubles widen_low(Floats x) { return (Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)); }
  static Doubles widen_high(Floats x) {
    return (Doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
  }
};

}  // namespace

#include "loops_body.h"

const fastclip::Loops fastclip::kAvx2Loops = fastclip::make_loops("avx2");

#include "target_end.h"
#endif
