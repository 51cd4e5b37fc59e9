// A few rows of x times a few rows of a weight, in registers: a tile loads every number once.
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
// x: packed, `steps` numbers from one STEP columns of all its rows to the next; see skinny.h. ahead: how far to
// prefetch in each row, in numbers: a tile reads several rows at once, each too short for the hardware prefetcher.
template <class Kind, int MR, int NR>
inline void tile(const typename Kind::Input* x, int64_t steps, const typename Kind::Weight* const* rows, int64_t k,
                 int64_t ahead, float* sums) {
  const typename Kind::Weight* weights[NR];
#pragma GCC unroll 4
  for (int j = 0; j < NR; ++j) weights[j] = rows[j];
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
      __builtin_prefetch(weights[j] + c + ahead, 0, 2);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const typename Kind::Vector row = Kind::load_input(x + i * Kind::STEP);
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

}  // namespace
