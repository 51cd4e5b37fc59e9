// What a step has beside the functions of other operators, one of each for every instruction set.
#pragma once

#include "../cpu/skinny.h"

struct StepFunctions {
  // y = x + y, rounded to `dtype`: N numbers each.
  void (*add)(const void* x, void* y, int64_t n, int32_t dtype);
};
