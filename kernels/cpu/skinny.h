// Products of a few rows: y (M, N) = x (M, K) @ weight (N, K)^T + bias, where reading the weight is most of the time.
#pragma once

#include <stdint.h>

// The dtypes of numbers, as the kernels name them.
enum Element : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// How x is packed for a weight of some dtype; see pack.h.
struct SkinnyPacking {
  int32_t dtype;
  int32_t step;
};

// What is computed, and where it lies. x has been packed: `step` columns of row 0, of row 1, ... of row M - 1, the next
// `step` columns of row 0, ...; zeros fill up the last step.
struct SkinnyProduct {
  const void* x;
  int32_t x_dtype;
  int64_t m, n, k;
  const void* weight;  // rows of `weight_dtype`, ldw numbers apart
  int64_t ldw;
  int32_t weight_dtype;
  const void* bias;  // N numbers, or null
  int32_t bias_dtype;
  void* y;  // (M, N), contiguous
  int32_t y_dtype;
};
