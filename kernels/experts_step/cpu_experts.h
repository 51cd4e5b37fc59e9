// What the experts have beside products and the gated units of other operators.
#pragma once

#include "../cpu/skinny.h"

struct ExpertsFunctions {
  // y = (up + 1) * gate * sigmoid(alpha * gate) of N pairs (gate, up) one after another, the gate clamped to at most
  // `limit`, up to -limit ... limit.
  void (*clamped)(const void* pairs, void* y, int64_t n, int32_t dtype, float alpha, float limit);
  // y = the sum of K rows times their weights, in float32, rounded once: N numbers of each. rows: their numbers, `stride`
  // apart in `data`, or -1 for one that is left out.
  void (*weighted)(const void* data, int64_t stride, const int64_t* rows, const float* weights, int64_t k, void* y,
                   int64_t n, int32_t dtype);
};
