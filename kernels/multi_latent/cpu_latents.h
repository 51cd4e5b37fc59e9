// Absorbed multi-head latent attention of few tokens: what each instruction set has of it. The queries of all heads attend
// to one row a key, a latent and its rotated part, whose first numbers are the value too.
#pragma once

#include "../decode/cpu_attention.h"

// out (M, N) = x (M, K) @ matrix (K, N), x and out in float32 with rows `ldx` and `ldo` numbers apart, the matrix of
// `dtype` with rows `ldm` apart.
struct LatentProduct {
  const float* x;
  int64_t ldx, m, k, n;
  const void* matrix;
  int64_t ldm;
  int32_t dtype;
  float* out;
  int64_t ldo;
};

struct LatentFunctions {
  // How queries are packed, the numbers of a query among the sums, and the bytes of memory that `attend` is given.
  SkinnyPacking (*packing)(int32_t dtype);
  void (*pack)(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, SkinnyPacking packing, void* out);
  int64_t (*sums_row)(int64_t value_dim);
  int64_t (*row_bytes)(const DecodeCall* call);
  void (*absorb)(const LatentProduct* product);
  // As decode's: `key` of the call are the latents (B, 1, S, Dv) and `value` the rotated keys (B, 1, S, D - Dv).
  void (*attend)(const DecodeCall* call, const DecodePart* part);
  // The output of one query, Dv numbers of float32, from its sums.
  void (*combine)(const DecodeCall* call, int64_t h, float* sums, int64_t parts, int64_t stride, float* out);
};
