// The gradients of attention of many query tokens: what is computed, and the functions that each instruction set has of it.
#pragma once

#include "cpu_flash.h"

struct FlashGradientCall {
  FlashCall call;  // its output and memory are not used
  FlashTensor grad, output;             // (B, T, H, Dv)
  const float* logsumexp;               // (B, H, T)
  void *grad_query, *grad_key, *grad_value;  // as query, key and value, contiguous
  float* grad_sinks;                    // (B, H)
};

struct FlashGradient {
  // Bytes of the scratch memory of `run`.
  int64_t (*scratch)(const FlashGradientCall* call);
  // The gradients of a (b, kv head) and of the queries that share it.
  void (*run)(const FlashGradientCall* call, int64_t b, int64_t kv, char* scratch);
};
