// The gradients of causal convolution by channel: what is computed, and the functions that each instruction set has of it.
#pragma once

#include "cpu_convolution.h"

struct ConvolutionGradientCall {
  ConvolutionCall call;     // its output and final are not used
  Strided grad;             // (B, T, C)
  const float* final_grad;  // (B, C, W - 1), or null
  void* grad_x;             // (B, T, C) of x's dtype, contiguous
  float* grad_taps;         // (B, W + 1, C): of each sequence's weight by tap, then of the bias
  float* grad_initial;      // (B, C, W - 1)
};

struct ConvolutionGradientSizes {
  int64_t channels, scratch;  // of a task
};

struct ConvolutionGradient {
  ConvolutionGradientSizes (*sizes)(const ConvolutionGradientCall* call);
  void (*run)(const ConvolutionGradientCall* call, int64_t b, int64_t channel, float* scratch);
};
