// What becomes of the products of queries and keys: scale, softcap, bias and mask of contract.py, and the sinks.
#pragma once

#include <stdint.h>

// (B, H, T, S), broadcast by strides of 0; strides in numbers. data null: there is none.
struct ScoreMatrix {
  const void* data;
  int64_t of_batch, of_head, of_row, of_column;
};

struct ScoreRules {
  float scale, softcap;  // softcap 0: none
  ScoreMatrix mask;      // a byte for each score: 0 hides it
  ScoreMatrix bias;
  int32_t bias_dtype;
  const void* sinks;  // H numbers, or null
  int32_t sinks_dtype;
};
