// The selective scan of Mamba: what is computed, and the functions that each instruction set has of it.
#pragma once

#include "../cpu/strided.h"

struct Ssm1Call {
  int64_t batch, length, channels, state;  // B, T, C, N
  Strided x, dt, z;  // (B, T, C)
  Strided B, C;      // (B, T, N)
  const float* A;    // (C, N)
  Strided D, dt_bias;  // (C,)
  bool softplus;
  Documents documents;
  const float* initial;  // (B, C, N), or null
  float* final;          // (B, C, N)
  void* output;          // (B, T, C) of x's dtype, contiguous
};

struct Ssm1Sizes {
  int64_t channels, scratch;  // of a task
};

struct Ssm1Functions {
  Ssm1Sizes (*sizes)(const Ssm1Call* call);
  void (*scan)(const Ssm1Call* call, int64_t b, int64_t channel, float* scratch);  // the channels from `channel` on
  void (*step)(const Ssm1Call* call, int64_t b, int64_t channel, float* scratch);  // the same, for few tokens
};
