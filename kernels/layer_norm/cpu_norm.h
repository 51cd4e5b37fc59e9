// The gradients of layer norm and of RMS norm, which does not subtract the mean.
#pragma once

#include "../cpu/strided.h"

// A row is N numbers of `dtype`; weight has that dtype where they are alike, else it is float32; or null.
struct NormGradient {
  // N numbers of `dtype` as such float32, and back.
  void (*widen)(const void* from, int64_t n, int32_t dtype, float* to);
  void (*narrow)(const float* from, int64_t n, int32_t dtype, void* to);
  // The gradient of x, from which the mean was subtracted where it is centered; those of weight and bias are added to.
  // scratch: N numbers, up to whole vectors.
  void (*backward)(const void* grad, const void* x, const void* weight, void* grad_x, float* grad_weight, float* grad_bias,
                   float* scratch, int64_t n, int32_t dtype, bool alike, float eps, bool centered);
};
