// A tensor of sequences, (B, T, heads, numbers), as the kernels take it.
#pragma once

#include "skinny.h"

// Strides in elements; the last dimension is contiguous. data null: the tensor is absent.
struct Strided {
  const void* data;
  int32_t dtype;
  int64_t of_batch, of_token, of_head;
};

// Segment ids of packed sequences (B, T); data null: one segment.
struct Documents {
  const int64_t* ids;
  int64_t of_batch, of_token;
  // Whether the token is of another segment than the one before it.
  bool begins(int64_t b, int64_t token) const {
    if (ids == nullptr || token == 0) return false;
    const int64_t* id = ids + b * of_batch + token * of_token;
    return *id != *(id - of_token);
  }
};
