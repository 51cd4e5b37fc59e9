// Blocks of a matrix, transposed in registers.
#pragma once

#include "vector.h"

namespace {

// WIDTH rows of WIDTH units of 32 bits, transposed; rows lie `row` and `to_row` bytes apart.
inline void transpose(const char* from, int64_t row, char* to, int64_t to_row) {
#if defined(__AVX512F__)
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + i * row);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 * i + k] has, in its lane l, the units 4 * l + k of the rows 4 * i to 4 * i + 3
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const __m512i even = _mm512_shuffle_i32x4(r[k], r[4 + k], 0x88), even2 = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(r[k], r[4 + k], 0xdd), odd2 = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0xdd);
    _mm512_storeu_si512(to + k * to_row, _mm512_shuffle_i32x4(even, even2, 0x88));
    _mm512_storeu_si512(to + (4 + k) * to_row, _mm512_shuffle_i32x4(odd, odd2, 0x88));
    _mm512_storeu_si512(to + (8 + k) * to_row, _mm512_shuffle_i32x4(even, even2, 0xdd));
    _mm512_storeu_si512(to + (12 + k) * to_row, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
  }
#else
  for (int64_t i = 0; i < WIDTH; ++i) {
    for (int64_t k = 0; k < WIDTH; ++k) memcpy(to + k * to_row + i * 4, from + i * row + k * 4, 4);
  }
#endif
}

}  // namespace
