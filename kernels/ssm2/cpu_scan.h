// The scan of Mamba-2: what is computed, and the functions that each instruction set has of it.
#pragma once

#include "../cpu/strided.h"

struct Ssm2Call {
  int64_t batch, length, heads, width, groups, state;  // B, T, H, P, G, N
  Strided x, z, B, C;   // (B, T, H, P) and (B, T, G, N)
  Strided dt;           // (B, T, H): its heads are the numbers of a row
  const float* A;       // (H,)
  Strided D, dt_bias;   // (H, P), rows `of_head` apart whose numbers are `of_token` apart; (H,)
  bool softplus;
  float least, greatest;
  Documents documents;
  const float* initial;  // (B, H, P, N), or null
  float* final;          // (B, H, P, N)
  void* output;          // (B, T, H, P) of x's dtype, contiguous
  float* plain;          // (B, T, H, P): the outputs before the gate, or null
  float* scores;         // of every (b, group, chunk) C B^T, `scores_size` numbers
};

struct Ssm2Sizes {
  int64_t chunk, scores, scratch;  // tokens; numbers of a chunk's scores, and of a task's memory
};

struct Ssm2Functions {
  Ssm2Sizes (*sizes)(const Ssm2Call* call);
  void (*score)(const Ssm2Call* call, int64_t b, int64_t group, int64_t chunk, float* scratch);
  void (*scan)(const Ssm2Call* call, int64_t b, int64_t head, float* scratch);  // after `score` of its group's chunks
  void (*step)(const Ssm2Call* call, int64_t b, int64_t head, float* scratch);  // the same, token by token
};
