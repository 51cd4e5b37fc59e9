// The functions of cpu_product_simd.cpp, which is compiled once for each instruction set.
#pragma once

#include "../cpu/skinny.h"

// The formats of a quantized weight, numbered as in cpu.py.
enum QuantizedFormat : int64_t {
  INT8 = 0, INT4 = 1, NF4 = 2, FP8_E4M3FN = 3, FP8_E5M2 = 4, FP4_E2M1 = 5, Q8_0 = 6, Q4_0 = 7, Q4_K = 8,
  Q6_K = 9, Q4_1 = 10, Q5_0 = 11, Q5_1 = 12, IQ4_NL = 13, Q2_K = 14, Q3_K = 15, Q5_K = 16, IQ4_XS = 17
};

// y (M, N) = x (M, K) @ weight (N, K)^T + bias, where the weight is (code - zero) * scale, by groups of columns.
struct QuantizedProduct {
  const void* x;  // packed, by one of the functions below
  int32_t x_dtype;  // before that
  int64_t m, n, k;
  int64_t format;
  const uint8_t* data;  // rows of codes, `row_bytes` apart
  int64_t row_bytes;
  const float* scale;  // rows of `groups` numbers, `scale_stride` apart; a stride of 0: one scale for all rows
  const uint8_t* zero;  // laid out as scale, or null
  int64_t groups, scale_stride, group_size;
  const void* bias;  // N numbers, or null
  int32_t bias_dtype;
  void* y;
  int32_t y_dtype;
};

// Codes as numbers of float32, of any x.
struct QuantizedFunctions {
  // Columns that are packed together; x takes M * K of them, rounded up.
  int64_t (*step)();
  // Packs one row of x, K numbers of `dtype` that are `stride` apart, among M rows.
  void (*pack)(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, int64_t format, float* out);
  // Computes the columns [begin, end) of y, from those rows of the weight.
  void (*run)(const QuantizedProduct* product, int64_t begin, int64_t end);
  // Row n of the weight as K numbers of float32 or bfloat16; of the product its weight is read.
  void (*decode)(const QuantizedProduct* product, int64_t n, void* out, int32_t dtype);
};

// Codes as numbers for dot product instructions, of the x that they take: exact but for what an implementation states.
struct CodesFunctions {
  // Whether this instruction set has it for the format, M rows of `dtype`, and groups of that size among `groups`.
  bool (*takes)(int64_t format, int32_t dtype, int64_t m, int64_t group_size, int64_t groups);
  // The bytes that M packed rows of K columns take.
  int64_t (*bytes)(int64_t format, int32_t dtype, int64_t m, int64_t k);
  // Packs row i of M, K numbers of `dtype` that are `stride` apart; false where its numbers are not taken, as where one is
  // infinite or NaN: a number that is a sum of two would give NaN for an infinity.
  bool (*pack)(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, int64_t i, int64_t format, void* out);
  void (*run)(const QuantizedProduct* product, int64_t begin, int64_t end);
};
