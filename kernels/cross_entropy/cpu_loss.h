// The cross entropy of a row of logits and its gradient, one function of it for every instruction set.
#pragma once

#include "../cpu/skinny.h"

struct LossSettings {
  int64_t vocabulary;
  int32_t dtype;  // of the logits
  float smoothing, z_loss;
  float softcap;  // 0 for none
};

struct LossFunctions {
  // -> the loss of the row, whose label is within it. Its gradient times `upstream` replaces the logits, unless `upstream`
  // is null. buffer: a float for each number of a row, and a vector more.
  float (*row)(void* logits, int64_t label, const float* upstream, const LossSettings* settings, float* buffer);
};
