// The functions of cpu_quantized_simd.cpp, one of each for every instruction set it is compiled for.
#pragma once

#include "../cpu/skinny.h"

// The formats of a quantized weight, as cpu.py names them.
enum QuantizedFormat : int64_t { INT8 = 0, INT4 = 1, NF4 = 2, FP8_E4M3FN = 3, FP8_E5M2 = 4 };

// y (M, N) = x (M, K) @ weight (N, K)^T + bias, the weight (code - zero) * scale of each group of columns.
struct QuantizedProduct {
  const float* x;  // packed by the function below
  int64_t m, n, k;
  int64_t format;
  const uint8_t* data;  // rows of codes, `row_bytes` apart
  int64_t row_bytes;
  const float* scale;  // rows of `groups` numbers, `scale_stride` apart: 0 where one stands for all
  const uint8_t* zero;  // laid out as scale, or null
  int64_t groups, scale_stride, group_size;
  const void* bias;  // N numbers, or null
  int32_t bias_dtype;
  void* y;
  int32_t y_dtype;
};

struct QuantizedFunctions {
  // Columns that are packed together; x takes M * K of them, rounded up.
  int64_t (*step)();
  // A row of x, K numbers of `dtype`, `stride` apart, to its places among M packed rows.
  void (*pack)(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, int64_t format, float* out);
  // The rows [begin, end) of the weight: those columns of y.
  void (*run)(const QuantizedProduct* product, int64_t begin, int64_t end);
};
