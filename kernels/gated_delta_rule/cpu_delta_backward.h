// The gradients of the gated delta rule: what is computed, and the functions that each instruction set has of it.
#pragma once

#include "cpu_delta.h"

struct DeltaGradientCall {
  DeltaCall call;           // not normalized; its output and final are not used
  Strided grad;             // (B, T, Hv, Dv)
  const float* final_grad;  // (B, Hv, Dk, Dv), or null
  float *grad_query, *grad_key;  // (B, T, H, Dk)
  float* grad_value;             // (B, T, Hv, Dv)
  float *grad_g, *grad_beta;     // (B, T, Hv)
  float* grad_initial;           // (B, Hv, Dk, Dv)
};

struct DeltaGradient {
  int64_t (*scratch)(const DeltaGradientCall* call);  // numbers of a task's memory
  void (*run)(const DeltaGradientCall* call, int64_t b, int64_t head, float* scratch);  // all value heads of a key
};
