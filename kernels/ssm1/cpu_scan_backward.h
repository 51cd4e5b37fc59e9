// The gradients of the selective scan: what is computed, and the functions that each instruction set has of it.
#pragma once

#include "cpu_scan.h"

struct Ssm1GradientCall {
  Ssm1Call call;            // without D, z, dt_bias and softplus: dt is the time step; its output and final are not used
  Strided grad;             // (B, T, C)
  const float* final_grad;  // (B, C, N), or null
  float *grad_x, *grad_dt;  // (B, T, C)
  float* grad_A;            // (B, C, N): of each sequence
  float* grad_initial;      // (B, C, N)
};

struct Ssm1Gradient {
  Ssm1Sizes (*sizes)(const Ssm1GradientCall* call);
  // The channels from `channel` on; their part of the gradients of B and C, (T, N), is added to `of_B` and `of_C`.
  void (*run)(const Ssm1GradientCall* call, int64_t b, int64_t channel, float* of_B, float* of_C, float* scratch);
};
