// RMS norm of a row, one function of it for every instruction set.
#pragma once

#include "../cpu/skinny.h"

struct NormFunctions {
  // y = x / sqrt(mean(x^2) + eps), rounded to `dtype`, times weight, or without one where it is null: N numbers each.
  void (*rms)(const void* x, const void* weight, void* y, int64_t n, int32_t dtype, float eps);
};
