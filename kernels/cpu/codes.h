// Numbers of one byte as vectors of float32: int8, and the float8 dtypes of torch.
#pragma once

#include "code_kinds.h"
#include "numbers.h"

namespace {

struct CodesInt8 {
  static inline Floats read(const uint8_t* p) { return load_int8(reinterpret_cast<const int8_t*>(p)); }
};

// Through float16, of which E5M2 is the upper half.
struct CodesE5M2 {
  static inline Floats read(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
#elif defined(__AVX2__)
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
#else
    Floats v;
    for (int i = 0; i < WIDTH; ++i) v.at[i] = float16_to_float(static_cast<uint16_t>(p[i] << 8));
    return v;
#endif
  }
};

// Through float16, whose exponent has a bias of 15 instead of 7: a factor of 256, subnormal numbers included. All seven
// bits set are NaN.
struct CodesE4M3FN {
  static inline Floats read(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(-0x4080));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7f));
    const Floats v = _mm512_mul_ps(_mm512_cvtph_ps(bits), _mm512_set1_ps(256.0f));
    return _mm512_mask_blend_ps(nan, v, _mm512_set1_ps(from_bits(0x7fc00000u)));
#elif defined(__AVX2__)
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i bits = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(-0x4080));
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7f));
    const Floats v = _mm256_mul_ps(_mm256_cvtph_ps(bits), _mm256_set1_ps(256.0f));
    return _mm256_blendv_ps(v, _mm256_set1_ps(from_bits(0x7fc00000u)), _mm256_castsi256_ps(_mm256_cvtepi16_epi32(nan)));
#else
    Floats v;
    for (int i = 0; i < WIDTH; ++i) {
      const uint32_t magnitude = p[i] & 0x7fu;
      const uint16_t half = static_cast<uint16_t>((p[i] & 0x80u) << 8 | magnitude << 7);
      v.at[i] = magnitude == 0x7fu ? from_bits(0x7fc00000u) : 256.0f * float16_to_float(half);
    }
    return v;
#endif
  }
};

// `dim` codes times the scale of their group, rounded to the numbers of a dtype; nothing beyond them is read or written.
template <class Codes, class Numbers>
inline void decode_row(const uint8_t* codes, const float* scales, int64_t group_size, int64_t dim,
                       typename Numbers::Number* out) {
  for (int64_t begin = 0; begin < dim; begin += group_size, ++scales) {
    const int64_t end = begin + group_size < dim ? begin + group_size : dim;
    const Floats scale = broadcast(*scales);
    int64_t d = begin;
#if defined(__AVX512BF16__)
    if (Numbers::DTYPE == BFLOAT16) {  // in a fifth of the instructions; subnormal numbers are taken for 0
      for (; d + 2 * WIDTH <= end; d += 2 * WIDTH) {
        const Floats low = multiply(Codes::read(codes + d), scale), high = multiply(Codes::read(codes + d + WIDTH), scale);
        _mm512_storeu_si512(reinterpret_cast<char*>(out + d), (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
    }
#endif
    for (; d + WIDTH <= end; d += WIDTH) Numbers::write(out + d, multiply(Codes::read(codes + d), scale));
    if (d == end) continue;
    uint8_t rest[WIDTH] = {};
    memcpy(rest, codes + d, static_cast<size_t>(end - d));
    write_some<Numbers>(out + d, end - d, multiply(Codes::read(rest), scale));
  }
}

}  // namespace
