// Causal convolution by channel: what is computed, and the functions that each instruction set has of it.
#pragma once

#include "../cpu/strided.h"

struct ConvolutionCall {
  int64_t batch, length, channels, width;  // B, T, C, W
  Strided x;                               // (B, T, C)
  Strided weight;                          // (C, W): of_token from channel to channel, of_head from tap to tap
  Strided bias;                            // (C,)
  bool silu;
  const float* initial;   // (B, C, W - 1), or null
  const int64_t* reach;   // (B, T): how many tokens before it a token reads, at most W - 1
  float* final;           // (B, C, W - 1)
  void* output;           // (B, T, C) of x's dtype, contiguous
  float* taps;            // (W + 1, C up to whole vectors): the weight by tap, then the bias
  float* past;            // (B, W - 1, the same): the tokens before the first
};

struct ConvolutionFunctions {
  int64_t (*row)(const ConvolutionCall* call);        // numbers of a row of taps and past
  void (*prepare)(const ConvolutionCall* call);       // taps and past
  void (*run)(const ConvolutionCall* call, int64_t b, int64_t first, int64_t end);  // tokens [first, end)
  void (*keep)(const ConvolutionCall* call, int64_t b);                             // the state after the last token
};
