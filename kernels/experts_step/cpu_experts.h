// What the experts have beside products and the gated units of other operators.
#pragma once

#include "../cpu/skinny.h"

// Columns that are a task of a weight (K, N): a page holds several lines of a row, and the sums stay in the L1 cache.
constexpr int64_t COLUMNS_OF_TASK = 512;

// y (M, N) = x (M, K) @ weight (K, N) + bias (N,); a weight's rows are `weight_row` numbers apart, those of x, in float32,
// K.
struct ColumnsProduct {
  const float* x;
  int64_t m, k, n;
  const void* weight;
  int64_t weight_row;
  const void* bias;  // or null
  void* y;
  int32_t dtype;  // of weight, bias and y
};

struct ExpertsFunctions {
  // A row of `k` numbers as float32.
  void (*widen)(const void* row, int64_t k, int32_t dtype, float* to);
  // The columns [begin, end), at most COLUMNS_OF_TASK.
  void (*columns)(const ColumnsProduct* product, int64_t begin, int64_t end);
  // y = (up + 1) * gate * sigmoid(alpha * gate) of N pairs (gate, up) one after another, the gate clamped to at most
  // `limit`, up to -limit ... limit.
  void (*clamped)(const void* pairs, void* y, int64_t n, int32_t dtype, float alpha, float limit);
  // y = the sum of K rows times their weights, in float32, rounded once: N numbers of each. rows: their numbers, `stride`
  // apart in `data`, or -1 for one that is left out.
  void (*weighted)(const void* data, int64_t stride, const int64_t* rows, const float* weights, int64_t k, void* y,
                   int64_t n, int32_t dtype);
};
