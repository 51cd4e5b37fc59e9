// The functions of cpu_skinny_simd.cpp, one of each for every instruction set it is compiled for.
#pragma once

#include "../cpu/skinny.h"

struct SkinnyFunctions {
  // How x is packed for a weight of `dtype`.
  SkinnyPacking (*packing)(int32_t dtype);
  // A row of x, K numbers of `dtype`, `stride` apart, to its places among M packed rows.
  void (*pack)(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, SkinnyPacking packing, void* out);
  // The rows [begin, end) of the weight: those columns of y.
  void (*run)(const SkinnyProduct* product, int64_t begin, int64_t end);
  // Where the first of the largest of N > 0 numbers stands, and that number; NaN is larger than any.
  int64_t (*largest)(const void* numbers, int64_t n, int32_t dtype, float* number);
};
