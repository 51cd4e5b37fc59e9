// A quantized weight whose rows are interleaved by 16: what a vector of lanes reads together lies together, so that a lane sums
// the products of a row of its own. interleaved.py defines it.
#pragma once

#include <string.h>

#include "cpu_product.h"

namespace easytorch {

// Rows that are interleaved, and the bytes of one of them that stand side by side.
constexpr int64_t INTERLEAVED_ROWS = 16, INTERLEAVED_BYTES = 4;

// A row is blocks of `block` bytes. Two of them, from `half` on, are a float16 scale; -1 for none.
struct InterleavedBlocks {
  int64_t block, half;
};

inline InterleavedBlocks interleaved_blocks(int64_t format) {
  switch (format) {
    case INT8: return {32, -1};
    case INT4:
    case FP4_E2M1: return {16, -1};
    case Q8_0: return {34, 0};
    case Q4_0: return {18, 0};
    case Q4_K: return {144, -1};
    case Q6_K: return {210, 208};
    default: return {0, -1};
  }
}

// Which of a block's 4 bytes come as number `line`. Those of q6_k are in the order in which they are used: scales, then lower
// bits of 16 columns, of the 16 columns 32 later, and their upper bits.
inline int64_t interleaved_line(int64_t format, int64_t line) {
  if (format != Q6_K) return line;
  if (line < 4) return 48 + line;
  const int64_t part = (line - 4) / 12, half = part / 2, at = 4 * (part % 2) + (line - 4) % 12 / 3;
  return (line - 4) % 3 == 2 ? 32 + 8 * half + at : 16 * half + at + (line - 4) % 3 * 8;
}

// Of 16 rows of `stored` bytes each, for every two blocks: the scales of the first block of each row, of the second, then 4 bytes
// of each row, the next 4, ... Calls copy(place in the 16 rows, place when they are interleaved, bytes).
template <class Copy>
inline void interleaved_places(int64_t format, int64_t stored, const Copy& copy) {
  const InterleavedBlocks of = interleaved_blocks(format);
  const int64_t blocks = stored / of.block, head = of.half < 0 ? 0 : 2, lines = (of.block - head) / INTERLEAVED_BYTES;
  const int64_t first = of.half == 0 ? head : 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t pair = block / 2 * 2, scales = pair * of.block * INTERLEAVED_ROWS + (block - pair) * INTERLEAVED_ROWS * head;
    const int64_t codes = block * of.block * INTERLEAVED_ROWS + (block == pair && block + 1 < blocks ? 2 : 1) * INTERLEAVED_ROWS * head;
    for (int64_t row = 0; row < INTERLEAVED_ROWS; ++row) {
      const int64_t from = row * stored + block * of.block;
      if (head > 0) copy(from + of.half, scales + row * head, head);
      int64_t to = codes + row * INTERLEAVED_BYTES;
      for (int64_t line = 0; line < lines; ++line, to += INTERLEAVED_ROWS * INTERLEAVED_BYTES) {
        copy(from + first + interleaved_line(format, line) * INTERLEAVED_BYTES, to, INTERLEAVED_BYTES);
      }
    }
  }
}

inline void interleave_rows(int64_t format, int64_t stored, const uint8_t* rows, uint8_t* out) {
  interleaved_places(format, stored, [&](int64_t from, int64_t to, int64_t bytes) {
    bytes == 2 ? memcpy(out + to, rows + from, 2) : memcpy(out + to, rows + from, 4);
  });
}
inline void separate_rows(int64_t format, int64_t stored, const uint8_t* interleaved, uint8_t* out) {
  interleaved_places(format, stored, [&](int64_t from, int64_t to, int64_t bytes) {
    bytes == 2 ? memcpy(out + from, interleaved + to, 2) : memcpy(out + from, interleaved + to, 4);
  });
}

}  // namespace easytorch
