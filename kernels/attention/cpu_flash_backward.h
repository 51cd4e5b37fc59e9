// The gradients of attention of many query tokens: what is computed, and the functions that each instruction set has of it.
#pragma once

#include "cpu_flash.h"

struct FlashGradientCall {
  FlashCall call;  // its output and memory are not used
  FlashTensor grad, output;             // (B, T, H, Dv)
  const float* logsumexp;               // (B, H, 2, T)
  void *grad_query, *grad_key, *grad_value;  // as query, key and value, contiguous
  float* grad_sinks;                    // (B, H)
  // The gradient of the bias for the heads of a kv head, in float32: strides in numbers, 0 where the bias broadcasts.
  bool wants_bias;
  int64_t bias_of_head, bias_of_row, bias_of_column;
};

struct FlashGradient {
  // Bytes of the scratch memory of `run`.
  int64_t (*scratch)(const FlashGradientCall* call);
  // The gradients of a (b, kv head) and of the queries that share it; that of the bias is added to `bias`.
  void (*run)(const FlashGradientCall* call, int64_t b, int64_t kv, float* bias, char* scratch);
};
