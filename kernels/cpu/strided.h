// A tensor of sequences, (B, T, heads, numbers), as the kernels take it.
#pragma once

#include "skinny.h"

// Strides in numbers; the numbers of the last dimension lie side by side. data null: there is none.
struct Strided {
  const void* data;
  int32_t dtype;
  int64_t of_batch, of_token, of_head;
};

// The documents of packed sequences (B, T); data null: one document.
struct Documents {
  const int64_t* ids;
  int64_t of_batch, of_token;
  // Whether the token begins a document that the one before it is not of.
  bool begins(int64_t b, int64_t token) const {
    if (ids == nullptr || token == 0) return false;
    const int64_t* id = ids + b * of_batch + token * of_token;
    return *id != *(id - of_token);
  }
};
