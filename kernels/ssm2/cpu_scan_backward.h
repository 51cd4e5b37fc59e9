// The gradients of the scan of Mamba-2: what is computed, and the functions that each instruction set has of it.
#pragma once

#include "cpu_scan.h"

struct Ssm2GradientCall {
  Ssm2Call call;            // without dt_bias, softplus and limits: dt is the time step; its results are not used
  Strided grad;             // (B, T, H, P)
  Strided plain;            // (B, T, H, P): the outputs before the gate z, absent as that
  const float* final_grad;  // (B, H, P, N), or null
  int64_t lanes;            // of a group's heads
  // of every (b, group, lane) the lane's parts of the gradients of B and C, (T, N) each
  float* of_lanes;
  void *grad_x, *grad_z;        // (B, T, H, P) of x's and z's dtypes
  float* grad_dt;               // (B, T, H)
  float *grad_A, *grad_D;       // of each sequence (B, H) and (B, H, P)
  void *grad_B, *grad_C;        // (B, T, G, N) of the dtypes of B and C
  float* grad_initial;          // (B, H, P, N)
};

struct Ssm2Gradient {
  int64_t (*scratch)(const Ssm2GradientCall* call);  // numbers of a task's memory
  int64_t (*chunks)(const Ssm2GradientCall* call);
  void (*run)(const Ssm2GradientCall* call, int64_t b, int64_t group, int64_t lane, float* scratch);
  // The gradients of B and C of a chunk's tokens, after `run` of all lanes of the group.
  void (*add_lanes)(const Ssm2GradientCall* call, int64_t b, int64_t group, int64_t chunk, float* scratch);
};
