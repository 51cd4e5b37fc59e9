// How rows of x are packed for a tile: its STEP columns of all rows side by side, zeros up to the last step.
#pragma once

#include "tile.h"

namespace {

SkinnyPacking packing(int32_t dtype) {
#if defined(__AVX512BF16__)
  if (dtype == BFLOAT16) return {BFLOAT16, OfBFloat16Pairs::STEP};
#endif
  (void)dtype;
  return {FLOAT32, WIDTH};
}

// A row, K numbers of `dtype`, `stride` apart, to its places among M packed rows.
void pack(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, SkinnyPacking to, void* out) {
  const int64_t size = to.dtype == FLOAT32 ? 4 : 2, from = dtype == FLOAT32 ? 4 : 2;
  for (int64_t c = 0; c < k; c += to.step, out = static_cast<char*>(out) + m * to.step * size) {
    const int64_t count = k - c < to.step ? k - c : to.step;
    const char* numbers = static_cast<const char*>(row) + c * stride * from;
    if (dtype == to.dtype && stride == 1) {
      memcpy(out, numbers, static_cast<size_t>(count * size));
    } else {
      for (int64_t i = 0; i < count; ++i) store_number(out, i, to.dtype, load_number(numbers, i * stride, dtype));
    }
    memset(static_cast<char*>(out) + count * size, 0, static_cast<size_t>((to.step - count) * size));
  }
}

}  // namespace
