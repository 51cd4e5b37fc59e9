// Attention of few query tokens over a cache, dense or in pages: what is computed, and the functions that each instruction
// set has of it.
#pragma once

#include "../attention/cpu_scores.h"
#include "../cpu/skinny.h"

// A tensor (B, heads, S, D) with a contiguous last dimension; strides in elements. B counts pages and S their slots
// where a sequence lies in pages.
struct DecodeCache {
  const void* data;
  int64_t of_batch, of_head, of_key;
  // Of codes of one byte (cpu/codes.h): a number is code * scale, rounded to the query's dtype. The scales of a key's head
  // lie one after another, each of `group_size` codes; strides as above.
  const float* scale;
  int64_t scale_of_batch, scale_of_head, scale_of_key, group_size;
};

struct DecodeCall {
  int32_t dtype;  // of query, key, value and output
  int64_t heads, kv_heads, dim, value_dim;
  DecodeCache key, value;
  ScoreRules rules;  // its matrices are (B, H, 1, S)
  void* output;      // (B, H, Dv), contiguous
  int32_t codes;     // the kind of codes of key and value, 0: numbers of `dtype`
  int64_t first;     // the number of the first key of a dense cache, which others precede
};

// Key j of a sequence lies in slot j % size of page table[j / size - first].
struct DecodePages {
  const int64_t* table;
  int64_t first, size;
};

// Keys [from, to) of sequence b for the heads of [kv_begin, kv_end), each with `group` queries. queries: those of sequence
// b, packed by key/value head; sums: where they begin, `sums_row` numbers each: the largest score, the sum of exp(score -
// largest), and so weighted the sum of the values.
struct DecodePart {
  int64_t b, from, to, kv_begin, kv_end, group;
  const void* queries;
  float* sums;
  const DecodePages* pages;  // or null: the cache is dense
  const int64_t* seen;       // the first key of each query of a group and that after its last; null where all see all
  char* decoded;             // of codes: `decoded_bytes` of memory
  // The number of the first query among those of sequence b, all heads of a token after those of the one before it.
  int64_t query;
};

struct DecodeFunctions {
  // How queries are packed, by group of the heads that share a key/value head, and the numbers a head has among the sums.
  SkinnyPacking (*packing)(int32_t dtype);
  void (*pack)(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, SkinnyPacking packing, void* out);
  int64_t (*sums_row)(int64_t value_dim);
  int64_t (*decoded_bytes)(const DecodeCall* call);
  void (*attend)(const DecodeCall* call, const DecodePart* part);
  // The output of head h of sequence b from its sums over `parts` ranges of keys, `stride` numbers apart.
  void (*combine)(const DecodeCall* call, int64_t b, int64_t h, float* sums, int64_t parts, int64_t stride);
};
