// A gated linear unit of a row, one function of it for every instruction set.
#pragma once

#include "../cpu/skinny.h"

enum Activation : int64_t { SILU = 0, GELU = 1, GELU_TANH = 2 };

struct GateFunctions {
  // y = activation(gate), rounded to `dtype`, times up: N numbers each.
  void (*run)(const void* gate, const void* up, void* y, int64_t n, int32_t dtype, int64_t activation);
  // The gradients of gate and up for that of y.
  void (*backward)(const void* grad, const void* gate, const void* up, void* gate_grad, void* up_grad, int64_t n,
                   int32_t dtype, int64_t activation);
};
