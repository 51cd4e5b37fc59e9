// Products in registers of numbers that lie in units of 32 bits, and how rows are packed for them.
#pragma once

#include "../cpu/rows.h"
#include "../cpu/transpose.h"

namespace {

// Rows and vectors of a product that is kept in registers.
#if defined(__AVX512F__)
constexpr int ROWS = 6, VECTORS = 4;
#elif defined(__AVX2__)
constexpr int ROWS = 4, VECTORS = 2;
#else
constexpr int ROWS = 2, VECTORS = 2;
#endif

constexpr int64_t UNIT = 4, PANEL = UNIT * WIDTH;

inline int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// function(numbers), of the kind of numbers that a dtype has: chosen once, not for each vector.
template <class Function>
inline void by_dtype(int32_t dtype, const Function& function) {
  switch (dtype) {
    case BFLOAT16: return function(NumbersBFloat16());
    case FLOAT16: return function(NumbersFloat16());
    default: return function(NumbersFloat32());
  }
}

// A unit holds a number of float32, or two of bfloat16 that are multiplied as a pair.
struct UnitsFloat32 {
  static constexpr int NUMBERS = 1;
  typedef Floats Vector;
  static inline Vector read(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  static inline Vector repeat(const char* p) {
    float value;
    memcpy(&value, p, sizeof value);
    return broadcast(value);
  }
  static inline Floats dot(Vector a, Vector b, Floats total) { return multiply_add(a, b, total); }
  static inline void write(char* p, Floats v) { store(reinterpret_cast<float*>(p), v); }
  // A row of `count` numbers, to as many units; nothing after them is written.
  static inline void row(char* to, const void* from, int64_t count, int32_t dtype) {
    by_dtype(dtype, [=](auto numbers) {
      typedef decltype(numbers) Numbers;
      const auto* const p = static_cast<const typename Numbers::Number*>(from);
      float* const out = reinterpret_cast<float*>(to);
      int64_t i = 0;
      for (; i + WIDTH <= count; i += WIDTH) store(out + i, Numbers::read(p + i));
      if (i < count) write_some<NumbersFloat32>(out + i, count - i, read_some<Numbers>(p + i, count - i));
    });
  }
  // `count` numbers of NUMBERS rows, WIDTH units side by side, and those of the next `panel` bytes on; zeros of a row that
  // is null.
  static inline void side_by_side(char* to, int64_t panel, const void* const* rows, int64_t count, int32_t dtype) {
    const void* const from = rows[0];
    if (from == nullptr) {
      for (int64_t d = 0; d < count; d += WIDTH, to += panel) write(to, zeros());
      return;
    }
    by_dtype(dtype, [=](auto numbers) {
      typedef decltype(numbers) Numbers;
      const auto* const p = static_cast<const typename Numbers::Number*>(from);
      char* out = to;
      for (int64_t d = 0; d < count; d += WIDTH, out += panel) write(out, read_some<Numbers>(p + d, count - d));
    });
  }
};
#if defined(__AVX512BF16__)
struct UnitsBFloat16 {
  static constexpr int NUMBERS = 2;
  typedef __m512i Vector;
  static inline Vector read(const char* p) { return _mm512_loadu_si512(p); }
  static inline Vector repeat(const char* p) {
    int32_t value;
    memcpy(&value, p, sizeof value);
    return _mm512_set1_epi32(value);
  }
  static inline Floats dot(Vector a, Vector b, Floats total) {
    return _mm512_dpbf16_ps(total, (__m512bh)a, (__m512bh)b);
  }
  // VCVTNEPS2BF16 takes subnormal numbers for 0: these are weights of 0 to 1, and their gradients.
  static inline __m256i narrow(Floats v) { return (__m256i)_mm512_cvtneps_pbh(v); }
  static inline void write(char* p, Floats v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
  static inline void write_pairs(char* p, Floats a, Floats b) { pairs(p, narrow(a), narrow(b)); }
  static inline void row(char* to, const void* from, int64_t count, int32_t) {
    memcpy(to, from, static_cast<size_t>(count) * 2);
  }
  static inline void side_by_side(char* to, int64_t panel, const void* const* rows, int64_t count, int32_t) {
    for (int64_t d = 0; d < count; d += WIDTH, to += panel) {
      pairs(to, numbers(rows[0], d, count - d), numbers(rows[1], d, count - d));
    }
  }

 private:
  static inline void pairs(char* p, __m256i a, __m256i b) {
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
    _mm512_storeu_si512(p, _mm512_or_si512(_mm512_cvtepu16_epi32(a), high));
  }
  static inline __m256i numbers(const void* row, int64_t at, int64_t count) {
    if (row == nullptr) return _mm256_setzero_si256();
    const uint16_t* p = static_cast<const uint16_t*>(row) + at;
    if (count >= WIDTH) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    uint16_t rest[WIDTH] = {};
    memcpy(rest, p, static_cast<size_t>(count) * 2);
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rest));
  }
};
#endif

template <class Units>
constexpr int64_t units_of(int64_t numbers) { return (numbers + Units::NUMBERS - 1) / Units::NUMBERS; }

// Rows of a matrix with a contiguous last dimension: `stride` numbers apart.
struct RowsOf {
  const void* data;
  int64_t first, stride, count, numbers;
  int32_t dtype;
  const void* at(int64_t row) const {
    return row < count ? number_at(data, first + row * stride, dtype) : nullptr;
  }
};

// Rows [first, first + `rows`) as units, `row_bytes` apart; zeros up to that, and where there is no row.
template <class Units>
inline void pack_rows(const RowsOf& m, int64_t first, int64_t rows, char* to, int64_t row_bytes) {
  const int64_t written = m.numbers * UNIT / Units::NUMBERS, last = m.count - first < rows ? m.count - first : rows;
  for (int64_t i = 0; i < last; ++i, to += row_bytes) {
    Units::row(to, m.at(first + i), m.numbers, m.dtype);
    if (written < row_bytes) memset(to + written, 0, static_cast<size_t>(row_bytes - written));
  }
  if (last < rows) memset(to, 0, static_cast<size_t>((rows - (last < 0 ? 0 : last)) * row_bytes));
}

// A panel for each WIDTH rows: WIDTH rows side by side for each unit. The bytes of a panel: up to whole vectors of units.
template <class Units>
constexpr int64_t panel_of_rows(int64_t numbers) { return up_to(units_of<Units>(numbers), WIDTH) * PANEL; }

// `rows`, a multiple of WIDTH, as such panels; scratch: the bytes of one.
template <class Units>
inline void pack_panels_of_rows(const RowsOf& m, int64_t rows, char* to, char* scratch) {
  const int64_t units = up_to(units_of<Units>(m.numbers), WIDTH), panel = units * PANEL;
  for (int64_t i = 0; i < rows; i += WIDTH, to += panel) {
    pack_rows<Units>(m, i, WIDTH, scratch, units * UNIT);
    for (int64_t u = 0; u < units; u += WIDTH) transpose(scratch + u * UNIT, units * UNIT, to + u * PANEL, PANEL);
  }
}

// Rows [first, first + `rows`) with a panel for each WIDTH numbers of them: a unit has NUMBERS rows. Panels lie `panel`
// bytes apart.
template <class Units>
inline void pack_panels_of_numbers(const RowsOf& m, int64_t first, int64_t rows, char* to, int64_t panel) {
  for (int64_t i = 0; i < rows; i += Units::NUMBERS, to += PANEL) {
    const void* units[Units::NUMBERS];
    for (int n = 0; n < Units::NUMBERS; ++n) units[n] = m.at(first + i + n);
    Units::side_by_side(to, panel, units, m.numbers, m.dtype);
  }
}

// y (ROWS, N * WIDTH) = a (ROWS, units) @ b (units, N * WIDTH); plus y where `add_to` is set. b lies in N panels, `panel`
// bytes apart, its units `b_unit` bytes apart.
template <class Units, int N>
inline void product(const char* a, int64_t a_row, const char* b, int64_t panel, int64_t b_unit, int64_t units, float* y,
                    int64_t y_row, bool add_to) {
  Floats totals[ROWS][N];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) totals[i][n] = add_to ? load(y + i * y_row + n * WIDTH) : zeros();
  for (int64_t u = 0; u < units; ++u) {
    typename Units::Vector columns[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) columns[n] = Units::read(b + n * panel + u * b_unit);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const typename Units::Vector row = Units::repeat(a + i * a_row + u * UNIT);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) totals[i][n] = Units::dot(row, columns[n], totals[i][n]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(y + i * y_row + n * WIDTH, totals[i][n]);
}

// The same of `panels`, up to VECTORS of them.
template <class Units>
inline void some_panels(int64_t panels, const char* a, int64_t a_row, const char* b, int64_t panel, int64_t b_unit,
                        int64_t units, float* y, int64_t y_row, bool add_to) {
  switch (panels) {
    case 1: return product<Units, 1>(a, a_row, b, panel, b_unit, units, y, y_row, add_to);
    case 2: return product<Units, 2>(a, a_row, b, panel, b_unit, units, y, y_row, add_to);
#if defined(__AVX512F__)
    case 3: return product<Units, 3>(a, a_row, b, panel, b_unit, units, y, y_row, add_to);
    case 4: return product<Units, 4>(a, a_row, b, panel, b_unit, units, y, y_row, add_to);
#endif
  }
}

// The same of `rows`, up to a multiple of ROWS, and of any number of `panels`.
template <class Units>
inline void multiply_rows(const char* a, int64_t a_row, int64_t rows, const char* b, int64_t panel, int64_t b_unit,
                          int64_t panels, int64_t units, float* y, int64_t y_row, bool add_to) {
  for (int64_t n = 0; n < panels; n += VECTORS) {  // the outer loop, so that a panel of b stays in L1 for all rows
    const int64_t some = panels - n < VECTORS ? panels - n : VECTORS;
    for (int64_t i = 0; i < rows; i += ROWS) {
      some_panels<Units>(some, a + i * a_row, a_row, b + n * panel, panel, b_unit, units, y + i * y_row + n * WIDTH, y_row,
                         add_to);
    }
  }
}

}  // namespace
