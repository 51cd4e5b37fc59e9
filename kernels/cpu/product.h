// Products of small float32 matrices that fit the caches, in register tiles.
#pragma once

#include "vector.h"

namespace {

// Rows and vectors of a register tile.
#if defined(__AVX512F__)
constexpr int PRODUCT_ROWS = 6, PRODUCT_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int PRODUCT_ROWS = 6, PRODUCT_VECTORS = 2;
#else
constexpr int PRODUCT_ROWS = 2, PRODUCT_VECTORS = 2;
#endif

inline int64_t rounded_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
inline int64_t whole_rows(int64_t count) { return rounded_up(count, PRODUCT_ROWS); }
inline int64_t whole_vectors(int64_t count) { return rounded_up(count, WIDTH); }

// The strides of a matrix, in elements.
struct LeftMatrix {
  const float* data;
  int64_t row, column;
};

template <int N>
inline void product_tile(const LeftMatrix& a, int64_t k, const float* b, int64_t b_row, float keep, float* y,
                         int64_t y_row) {
  Floats totals[PRODUCT_ROWS][N];
  if (keep == 0.0f) {  // y is not read: it may hold NaN
#pragma GCC unroll 8
    for (int i = 0; i < PRODUCT_ROWS; ++i)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) totals[i][n] = zeros();
  } else {
    const Floats factor = broadcast(keep);
#pragma GCC unroll 8
    for (int i = 0; i < PRODUCT_ROWS; ++i)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) totals[i][n] = multiply(load(y + i * y_row + n * WIDTH), factor);
  }
  const float* rows = a.data;
  for (int64_t u = 0; u < k; ++u, rows += a.column, b += b_row) {
    Floats columns[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) columns[n] = load(b + n * WIDTH);
#pragma GCC unroll 8
    for (int i = 0; i < PRODUCT_ROWS; ++i) {
      const Floats number = broadcast(rows[i * a.row]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) totals[i][n] = multiply_add(number, columns[n], totals[i][n]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < PRODUCT_ROWS; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(y + i * y_row + n * WIDTH, totals[i][n]);
}

enum Triangle { WHOLE, LOWER_LEFT, LOWER_RESULT };

inline void product_tiles(const LeftMatrix& a, int64_t k, const float* b, int64_t b_row, int64_t vectors, float keep, float* y,
                          int64_t y_row) {
  switch (vectors) {
    case 1: return product_tile<1>(a, k, b, b_row, keep, y, y_row);
    case 2: return product_tile<2>(a, k, b, b_row, keep, y, y_row);
#if defined(__AVX512F__)
    case 3: return product_tile<3>(a, k, b, b_row, keep, y, y_row);
    case 4: return product_tile<4>(a, k, b, b_row, keep, y, y_row);
#endif
  }
}

// y (rows, columns) = keep * y + a (rows, k) @ b (k, columns). All of a and y are read and written up to whole_rows(rows),
// of b and y up to whole_vectors(columns). LOWER_LEFT: a is 0 above its diagonal, and is not read beyond that of a tile;
// LOWER_RESULT: y is wanted up to its diagonal only.
inline void multiply_matrices(LeftMatrix a, int64_t rows, int64_t k, const float* b, int64_t b_row, int64_t columns,
                              float keep, float* y, int64_t y_row, Triangle triangle = WHOLE) {
  const int64_t vectors = whole_vectors(columns) / WIDTH;
  for (int64_t n = 0; n < vectors; n += PRODUCT_VECTORS) {  // the outer loop, so that columns of b stay in L1 for all rows
    const int64_t most = vectors - n < PRODUCT_VECTORS ? vectors - n : PRODUCT_VECTORS;
    for (int64_t i = 0; i < rows; i += PRODUCT_ROWS) {
      const int64_t diagonal = i + PRODUCT_ROWS, seen = whole_vectors(diagonal) / WIDTH - n;
      const int64_t end = triangle == LOWER_LEFT && diagonal < k ? diagonal : k;
      const int64_t count = triangle == LOWER_RESULT && seen < most ? seen : most;
      if (count <= 0) continue;
      product_tiles({a.data + i * a.row, a.row, a.column}, end, b + n * WIDTH, b_row, count, keep, y + i * y_row + n * WIDTH,
                    y_row);
    }
  }
}

}  // namespace
