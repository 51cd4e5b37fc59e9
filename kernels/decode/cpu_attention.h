// Attention of one query token: what is computed, and the functions that each instruction set has of it.
#pragma once

#include "../cpu/skinny.h"

// A tensor (B, heads, S, D) whose last dimension lies side by side; strides in numbers.
struct DecodeCache {
  const void* data;
  int64_t of_batch, of_head, of_key;
};

// (B, H, 1, S), broadcast by strides of 0; data null where there is none.
struct DecodeMatrix {
  const void* data;
  int64_t of_batch, of_head, of_key;
};

struct DecodeCall {
  int32_t dtype;  // of query, key, value and output
  int64_t heads, kv_heads, dim, value_dim;
  DecodeCache key, value;
  DecodeMatrix mask;  // a byte for each key: 0 hides it
  DecodeMatrix bias;
  int32_t bias_dtype;
  const void* sinks;  // H numbers, or null
  int32_t sinks_dtype;
  float scale, softcap;  // softcap 0: none
  void* output;          // (B, H, Dv), contiguous
};

// Keys [from, to) of sequence b for the heads of [kv_begin, kv_end). queries: those of sequence b, packed; sums: where the
// heads of sequence b begin, `sums_row` numbers each: the largest score, the sum of exp(score - largest), and so weighted
// the sum of the values.
struct DecodePart {
  int64_t b, from, to, kv_begin, kv_end;
  const void* queries;
  float* sums;
};

struct DecodeFunctions {
  // How queries are packed, by group of the heads that share a key/value head, and the numbers a head has among the sums.
  SkinnyPacking (*packing)(int32_t dtype);
  void (*pack)(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, SkinnyPacking packing, void* out);
  int64_t (*sums_row)(int64_t value_dim);
  void (*attend)(const DecodeCall* call, const DecodePart* part);
  // The output of head h of sequence b from its sums over `parts` ranges of keys, `stride` numbers apart.
  void (*combine)(const DecodeCall* call, int64_t b, int64_t h, float* sums, int64_t parts, int64_t stride);
};
