// The gated delta rule: what is computed, and the functions that each instruction set has of it.
#pragma once

#include "../cpu/strided.h"

struct DeltaCall {
  int64_t batch, length, heads, key_width, value_heads, value_width;  // B, T, H, Dk, Hv, Dv
  Strided query, key, value;  // (B, T, H, Dk) and (B, T, Hv, Dv)
  Strided g, beta;            // (B, T, Hv): their heads are the numbers of a row
  float scale;
  bool normalized;  // query and key are divided by sqrt(their squared norm + epsilon) first
  float epsilon;
  Documents documents;
  const float* initial;  // (B, Hv, Dk, Dv), or null
  float* final;          // (B, Hv, Dk, Dv)
  void* output;          // (B, T, Hv, Dv) of value's dtype, contiguous
};

struct DeltaFunctions {
  int64_t (*scratch)(const DeltaCall* call);  // numbers of a task's memory
  void (*chunks)(const DeltaCall* call, int64_t b, int64_t head, float* scratch);       // all value heads of a key
  void (*step)(const DeltaCall* call, int64_t b, int64_t value_head, float* scratch);  // one, token by token
};
