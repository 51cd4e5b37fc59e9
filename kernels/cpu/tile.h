// A few rows of x times rows of a weight, in registers: a few of these at once, or one after another.
#pragma once

#include "vector.h"

namespace {

// How a tile reads x and weights: STEP numbers at a time, multiplied and accumulated in float32.
struct InFloat32 {
  typedef float Input;
  typedef Floats Vector;
  static constexpr int STEP = WIDTH;
  static inline Vector load_input(const Input* p) { return load(p); }
  static inline Floats dot(Vector a, Vector b, Floats total) { return multiply_add(a, b, total); }
  // In its register: GCC would load it again for each row of the weight, which takes longer than the sums of many rows.
  static inline void keep(Vector& a) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(a));
#else
    (void)a;
#endif
  }
};
struct OfFloat32 : InFloat32 {
  typedef float Weight;
  static inline Vector load_weight(const Weight* p) { return load(p); }
};
struct OfBFloat16 : InFloat32 {
  typedef uint16_t Weight;
  static inline Vector load_weight(const Weight* p) { return load_bfloat16(p); }
};
struct OfFloat16 : InFloat32 {
  typedef uint16_t Weight;
  static inline Vector load_weight(const Weight* p) { return load_float16(p); }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16 multiplied exactly and added in float32, with two roundings per pair; subnormals are flushed to
// zero.
struct OfBFloat16Pairs {
  typedef uint16_t Weight;
  typedef uint16_t Input;
  typedef __m512i Vector;
  static constexpr int STEP = 32;
  static inline Vector load_weight(const Weight* p) { return _mm512_loadu_si512(p); }
  static inline Vector load_input(const Input* p) { return _mm512_loadu_si512(p); }
  static inline Floats dot(Vector a, Vector b, Floats total) {
    return _mm512_dpbf16_ps(total, (__m512bh)a, (__m512bh)b);
  }
  static inline void keep(Vector&) {}
};
#endif

// Weight rows per tile for MR rows of x, such that the sums fit the registers.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 8;
constexpr int columns_of(int rows) { return rows > 6 ? 3 : 4; }
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 4;
constexpr int columns_of(int rows) { return rows > 3 ? 3 : 4; }
#else
constexpr int MOST_ROWS = 2;
constexpr int columns_of(int) { return 4; }
#endif

// sums[i * 4 + j] = x row i . weight row j over K columns. The weight's rows are not read beyond K.
//
// x: packed, `steps` numbers from one STEP columns of all its rows to the next; see skinny.h. ahead: how far to prefetch,
// in numbers, from each row: a tile reads several rows at once, each too short for the hardware prefetcher.
template <class Kind, int MR, int NR>
inline void tile(const typename Kind::Input* x, int64_t steps, const typename Kind::Weight* const* rows, int64_t k,
                 const int64_t (&ahead)[NR], float* sums) {
  const typename Kind::Weight *weights[NR], *later[NR];
#pragma GCC unroll 4
  for (int j = 0; j < NR; ++j) weights[j] = rows[j], later[j] = rows[j] + ahead[j];
  Floats totals[MR][NR];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) totals[i][j] = zeros();
  int64_t c = 0;
  for (; c + Kind::STEP <= k; c += Kind::STEP, x += steps) {
    typename Kind::Vector columns[NR];
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) {
      columns[j] = Kind::load_weight(weights[j] + c);
      __builtin_prefetch(later[j] + c, 0, 2);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      typename Kind::Vector row = Kind::load_input(x + i * Kind::STEP);
      if (MR > 4) Kind::keep(row);
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j) totals[i][j] = Kind::dot(row, columns[j], totals[i][j]);
    }
  }
  if (c < k) {
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) {
      typename Kind::Weight rest[Kind::STEP] = {};
      memcpy(rest, weights[j] + c, static_cast<size_t>(k - c) * sizeof *rest);
      const typename Kind::Vector column = Kind::load_weight(rest);
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) totals[i][j] = Kind::dot(Kind::load_input(x + i * Kind::STEP), column, totals[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
    sum4(totals[i][0], totals[i][1], totals[i][2], NR > 3 ? totals[i][NR - 1] : zeros(), sums + 4 * i);
  }
}

// Rows of x up to which a weight is read row by row, in the order of its addresses; the independent sums of each.
#if defined(__AVX512F__)
constexpr int MOST_STREAMED = 4;
#elif defined(__AVX2__)
constexpr int MOST_STREAMED = 2;
#else
constexpr int MOST_STREAMED = 1;
#endif
constexpr int streams_of(int rows) { return rows == 1 ? 2 : 4; }

// sums[i] = x row i . the weight's row over K columns, for MR up to MOST_STREAMED; the rest as for a tile.
//
// A weight that is read so, without a prefetch, comes at the speed of a plain read. Measured on one thread of a Zen 4,
// 4096x1024 in bfloat16, of a plain read: one sum 1.01, two 0.99, four 1.16 (too many loads at once confuse the hardware
// prefetcher; with prefetches of 4 KiB ahead 1.04, of 8 KiB 1.3), tiles of four rows 1.2 to 1.3. With three and four rows
// of x four sums are best (0.99 and 1.02 where two have 1.37 and 2.6).
template <class Kind, int MR>
inline void stream(const typename Kind::Input* x, int64_t steps, const typename Kind::Weight* row, int64_t k, float* sums) {
  constexpr int PARTS = streams_of(MR);  // independent sums
  Floats totals[MR][PARTS];
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; ++part) totals[i][part] = zeros();
  int64_t c = 0;
  for (; c + PARTS * Kind::STEP <= k; c += PARTS * Kind::STEP) {
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; ++part, x += steps) {
      const typename Kind::Vector column = Kind::load_weight(row + c + part * Kind::STEP);
#pragma GCC unroll 4
      for (int i = 0; i < MR; ++i) {
        totals[i][part] = Kind::dot(Kind::load_input(x + i * Kind::STEP), column, totals[i][part]);
      }
    }
  }
  for (; c < k; c += Kind::STEP, x += steps) {
    typename Kind::Vector column;
    if (c + Kind::STEP <= k) {
      column = Kind::load_weight(row + c);
    } else {
      typename Kind::Weight rest[Kind::STEP] = {};
      memcpy(rest, row + c, static_cast<size_t>(k - c) * sizeof *rest);
      column = Kind::load_weight(rest);
    }
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) totals[i][0] = Kind::dot(Kind::load_input(x + i * Kind::STEP), column, totals[i][0]);
  }
  float four[4];
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int part = 1; part < PARTS; ++part) totals[i][0] = add(totals[i][0], totals[i][part]);
  sum4(totals[0][0], totals[MR > 1 ? 1 : 0][0], totals[MR > 2 ? 2 : 0][0], totals[MR > 3 ? 3 : 0][0], four);
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) sums[i] = four[i];
}

}  // namespace
