// Vectors of float32, with the same functions for every instruction set.
//
// Included by the *_simd.cpp sources, which are compiled once for each instruction set: which one is seen from the
// compiler's own macros. Everything here is static, so that no function compiled for one set is linked into another.
#pragma once

#include <stdint.h>
#include <string.h>

#include "skinny.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bfloat16_to_float(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);  // a quiet NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#if defined(__F16C__)
inline float float16_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t float_to_float16(float value) { return static_cast<uint16_t>(_cvtss_sh(value, 0)); }
#else
inline float float16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | magnitude << 13);
  // the exponent's bias is 15 there and 127 here: a factor of 2**112, which also makes subnormal numbers normal
  return from_bits(sign | to_bits(from_bits(magnitude << 13) * from_bits(0x77800000u)));
}
inline uint16_t float_to_float16(float value) {
  const uint32_t bits = to_bits(value), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {                        // below 2**-14: multiples of 2**-24, rounded by the addition
    return sign | static_cast<uint16_t>(to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u);
  }
  return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}
#endif

inline float load_number(const void* base, int64_t index, int32_t dtype) {
  if (dtype == FLOAT32) return static_cast<const float*>(base)[index];
  const uint16_t bits = static_cast<const uint16_t*>(base)[index];
  return dtype == BFLOAT16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

inline void store_number(void* base, int64_t index, int32_t dtype, float value) {
  if (dtype == FLOAT32) {
    static_cast<float*>(base)[index] = value;
  } else {
    static_cast<uint16_t*>(base)[index] = dtype == BFLOAT16 ? float_to_bfloat16(value) : float_to_float16(value);
  }
}

#if defined(__AVX512F__)

typedef __m512 Floats;
constexpr int WIDTH = 16;
inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats broadcast(float value) { return _mm512_set1_ps(value); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }  // b where either is NaN
inline Floats rounded(Floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
// v * 2**n, n integers of -126 to 127
inline Floats scaled(Floats v, Floats n) { return _mm512_scalef_ps(v, n); }
inline float largest(Floats v) { return _mm512_reduce_max_ps(v); }
inline float sum(Floats v) { return _mm512_reduce_add_ps(v); }
inline __m256 halved(Floats v) {
  return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}
inline Floats load_bfloat16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline Floats load_float16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

#elif defined(__AVX2__)

typedef __m256 Floats;
constexpr int WIDTH = 8;
inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats broadcast(float value) { return _mm256_set1_ps(value); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }  // b where either is NaN
inline Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }  // b where either is NaN
inline Floats rounded(Floats v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
// v * 2**n, n integers of -126 to 127
inline Floats scaled(Floats v, Floats n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(v, _mm256_castsi256_ps(exponent));
}
inline float largest(Floats v) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline __m256 halved(Floats v) { return v; }
inline float sum(Floats v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline Floats load_bfloat16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline Floats load_float16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

#else  // whatever the compiler takes for granted: SSE2 on x86-64, NEON on arm64

struct Floats {
  float at[8];
};
constexpr int WIDTH = 8;
inline Floats broadcast(float value) {
  Floats v;
  for (int i = 0; i < WIDTH; ++i) v.at[i] = value;
  return v;
}
inline Floats zeros() { return broadcast(0.0f); }
inline Floats load(const float* p) {
  Floats v;
  memcpy(v.at, p, sizeof v.at);
  return v;
}
inline void store(float* p, Floats v) { memcpy(p, v.at, sizeof v.at); }
inline Floats multiply(Floats a, Floats b) {
  for (int i = 0; i < WIDTH; ++i) a.at[i] *= b.at[i];
  return a;
}
inline Floats add(Floats a, Floats b) {
  for (int i = 0; i < WIDTH; ++i) a.at[i] += b.at[i];
  return a;
}
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  for (int i = 0; i < WIDTH; ++i) c.at[i] += a.at[i] * b.at[i];
  return c;
}
inline Floats divide(Floats a, Floats b) {
  for (int i = 0; i < WIDTH; ++i) a.at[i] /= b.at[i];
  return a;
}
inline Floats maximum(Floats a, Floats b) {  // b where either is NaN
  for (int i = 0; i < WIDTH; ++i) b.at[i] = a.at[i] > b.at[i] ? a.at[i] : b.at[i];
  return b;
}
inline Floats minimum(Floats a, Floats b) {  // b where either is NaN
  for (int i = 0; i < WIDTH; ++i) b.at[i] = a.at[i] < b.at[i] ? a.at[i] : b.at[i];
  return b;
}
inline Floats rounded(Floats v) {  // of less than 2**22
  for (int i = 0; i < WIDTH; ++i) v.at[i] = (v.at[i] + 12582912.0f) - 12582912.0f;
  return v;
}
inline Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  for (int i = 0; i < WIDTH; ++i) no.at[i] = a.at[i] < b.at[i] ? yes.at[i] : no.at[i];
  return no;
}
// v * 2**n, n integers of -126 to 127
inline Floats scaled(Floats v, Floats n) {
  for (int i = 0; i < WIDTH; ++i) {
    const float whole = n.at[i] == n.at[i] ? n.at[i] : 0.0f;  // a conversion of NaN is not defined
    v.at[i] *= from_bits(static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23);
  }
  return v;
}
inline float largest(Floats v) {
  float found = v.at[0];
  for (int i = 1; i < WIDTH; ++i) found = v.at[i] > found ? v.at[i] : found;
  return found;
}
inline float sum(Floats v) {
  float total = 0.0f;
  for (int i = 0; i < WIDTH; ++i) total += v.at[i];
  return total;
}
inline Floats load_bfloat16(const uint16_t* p) {
  Floats v;
  for (int i = 0; i < WIDTH; ++i) v.at[i] = bfloat16_to_float(p[i]);
  return v;
}
inline Floats load_float16(const uint16_t* p) {
  Floats v;
  for (int i = 0; i < WIDTH; ++i) v.at[i] = float16_to_float(p[i]);
  return v;
}
inline Floats load_int8(const int8_t* p) {
  Floats v;
  for (int i = 0; i < WIDTH; ++i) v.at[i] = static_cast<float>(p[i]);
  return v;
}

#endif

// The sums of four vectors, to four numbers.
inline void sum4(Floats a, Floats b, Floats c, Floats d, float* sums) {
#if defined(__AVX2__)
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(halved(a), halved(b)), _mm256_hadd_ps(halved(c), halved(d)));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  sums[0] = sum(a), sums[1] = sum(b), sums[2] = sum(c), sums[3] = sum(d);
#endif
}

}  // namespace
