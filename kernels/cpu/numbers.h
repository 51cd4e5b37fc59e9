// Numbers of each dtype as vectors of float32: read, written, and rounded to what the dtype holds.
#pragma once

#include "vector.h"

namespace {

#if defined(__AVX512F__)
// The bits of v as bfloat16, to nearest even, in the upper halves. Not VCVTNEPS2BF16, which takes subnormals for 0.
inline __m512i bfloat16_bits(Floats v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_and_si512(_mm512_mask_or_epi32(nearest, nan, bits, _mm512_set1_epi32(0x400000)),
                          _mm512_set1_epi32(-0x10000));
}
inline Floats as_bfloat16(Floats v) { return _mm512_castsi512_ps(bfloat16_bits(v)); }
inline void store_bfloat16(uint16_t* p, Floats v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bfloat16_bits(v), 16)));
}
inline __m256i float16_bits(Floats v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats as_float16(Floats v) { return _mm512_cvtph_ps(float16_bits(v)); }
inline void store_float16(uint16_t* p, Floats v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), float16_bits(v));
}
#elif defined(__AVX2__)
// The bits of v as bfloat16, to nearest even, in the upper halves.
inline __m256i bfloat16_bits(Floats v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  const __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(nearest), _mm256_castsi256_ps(quiet), nan);
  return _mm256_and_si256(_mm256_castps_si256(chosen), _mm256_set1_epi32(-0x10000));
}
inline Floats as_bfloat16(Floats v) { return _mm256_castsi256_ps(bfloat16_bits(v)); }
inline void store_bfloat16(uint16_t* p, Floats v) {
  const __m256i bits = _mm256_srli_epi32(bfloat16_bits(v), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}
inline __m128i float16_bits(Floats v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats as_float16(Floats v) { return _mm256_cvtph_ps(float16_bits(v)); }
inline void store_float16(uint16_t* p, Floats v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), float16_bits(v)); }
#else
inline Floats as_bfloat16(Floats v) {
  for (int i = 0; i < WIDTH; ++i) v.at[i] = bfloat16_to_float(float_to_bfloat16(v.at[i]));
  return v;
}
inline void store_bfloat16(uint16_t* p, Floats v) {
  for (int i = 0; i < WIDTH; ++i) p[i] = float_to_bfloat16(v.at[i]);
}
inline Floats as_float16(Floats v) {
  for (int i = 0; i < WIDTH; ++i) v.at[i] = float16_to_float(float_to_float16(v.at[i]));
  return v;
}
inline void store_float16(uint16_t* p, Floats v) {
  for (int i = 0; i < WIDTH; ++i) p[i] = float_to_float16(v.at[i]);
}
#endif

struct NumbersFloat32 {
  typedef float Number;
  static constexpr int32_t DTYPE = FLOAT32;
  static inline Floats read(const Number* p) { return load(p); }
  static inline void write(Number* p, Floats v) { store(p, v); }
  static inline Floats round(Floats v) { return v; }
};
struct NumbersBFloat16 {
  typedef uint16_t Number;
  static constexpr int32_t DTYPE = BFLOAT16;
  static inline Floats read(const Number* p) { return load_bfloat16(p); }
  static inline void write(Number* p, Floats v) { store_bfloat16(p, v); }
  static inline Floats round(Floats v) { return as_bfloat16(v); }
};
struct NumbersFloat16 {
  typedef uint16_t Number;
  static constexpr int32_t DTYPE = FLOAT16;
  static inline Floats read(const Number* p) { return load_float16(p); }
  static inline void write(Number* p, Floats v) { store_float16(p, v); }
  static inline Floats round(Floats v) { return as_float16(v); }
};

// The first `count` numbers, zeros up to a vector; nothing beyond them is read.
template <class Numbers>
inline Floats read_some(const typename Numbers::Number* p, int64_t count) {
  if (count >= WIDTH) return Numbers::read(p);
  typename Numbers::Number rest[WIDTH] = {};
  memcpy(rest, p, static_cast<size_t>(count) * sizeof *rest);
  return Numbers::read(rest);
}

// The first `count` of a vector; nothing beyond them is written.
template <class Numbers>
inline void write_some(typename Numbers::Number* p, int64_t count, Floats v) {
  if (count >= WIDTH) return Numbers::write(p, v);
  typename Numbers::Number rest[WIDTH];
  Numbers::write(rest, v);
  memcpy(p, rest, static_cast<size_t>(count) * sizeof *rest);
}

}  // namespace
