// Attention of many query tokens: what is computed, and the functions that each instruction set has of it.
#pragma once

#include "../cpu/skinny.h"
#include "cpu_scores.h"

// (B, T, heads, D) with a contiguous last dimension; strides in elements.
struct FlashTensor {
  const void* data;
  int64_t of_batch, of_head, of_row;
};

struct FlashCall {
  int32_t dtype;  // of query, key, value and output
  int64_t batch, length, keys, heads, kv_heads, dim, value_dim;
  FlashTensor query, key, value;
  ScoreRules rules;
  int64_t left, right;   // the band around the diagonal that ends at the last query and key
  const int64_t* spans;  // (B, T, 2): the first key of a query's segment and that after its last; null without segments
  const int64_t *query_ids, *key_ids;  // (B, T) and (B, S): segments, where a span holds keys of others too; else null
  float kept;            // what dropout multiplies the weights by that it keeps; 0 without dropout
  uint32_t seed, dropped;  // it keeps those with a hash of at least `dropped`
  void* output;          // (B, T, H, Dv), contiguous
  float* logsumexp;      // (B, H, 2, T): log(sum(exp(scores))) in the two parts of logsumexp.py; or null
  // Keys and values of each (b, kv head) from number b * kv_heads + kv = `first_pair` on, as `pack` leaves them:
  // `packed_keys` and `packed_values` bytes each.
  char *keys_memory, *values_memory;
  int64_t first_pair;
};

// Bytes of memory; see FlashFunctions.
struct FlashSizes {
  int64_t query_rows;                     // of a task
  int64_t packed_keys, packed_values;     // of one (b, kv head)
  int64_t scratch;                        // of a task
  int64_t pack_scratch;                   // of `pack`
};

struct FlashFunctions {
  FlashSizes (*sizes)(const FlashCall* call);
  // The keys and values of a (b, kv head) as `attend` reads them.
  void (*pack)(const FlashCall* call, int64_t b, int64_t kv, char* scratch);
  // Queries [row, row + query_rows) of (b, h).
  void (*attend)(const FlashCall* call, int64_t b, int64_t h, int64_t row, char* scratch);
};
