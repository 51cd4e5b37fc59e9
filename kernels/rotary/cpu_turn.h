// The rotation of one head, one function of it for every instruction set.
#pragma once

#include "../cpu/skinny.h"

struct TurnFunctions {
  // The halves of the first R numbers of x turned by the angles of cos and sin (R numbers each), the other D - R as they
  // are; products and sums are rounded to `dtype`.
  void (*halves)(const void* x, const void* cos, const void* sin, void* y, int64_t r, int64_t d, int32_t dtype);
};
