// The tensors of a selective scan, checked.
#pragma once

#include "../cpu/sequences.h"
#include "cpu_scan.h"

namespace easytorch {

// x and dt (B, T, C), A (C, N) float32, B and C (B, T, N), initial (B, C, N) float32, documents (B, T) int64; an absent
// one is (0,). Without D, z, dt_bias, softplus and results.
inline Ssm1Call scan_call(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B, const Tensor& C,
                          const Tensor& initial, const Tensor& documents) {
  require(x.dim == 3 && A.dim == 2, "ssm1 takes x (B, T, C) and A (C, N)");
  Ssm1Call call{};
  call.batch = x.sizes[0], call.length = x.sizes[1], call.channels = x.sizes[2], call.state = A.sizes[1];
  require(call.length > 0 && call.channels > 0 && call.state > 0, "ssm1 takes tokens, channels and a state");
  call.x = sequence_of(x, call.batch, call.length, 0, call.channels, "ssm1: x is (B, T, C)");
  call.dt = sequence_of(dt, call.batch, call.length, 0, call.channels, "ssm1: dt is (B, T, C)");
  call.B = sequence_of(B, call.batch, call.length, 0, call.state, "ssm1: B is (B, T, N)");
  call.C = sequence_of(C, call.batch, call.length, 0, call.state, "ssm1: C is (B, T, N)");
  require(call.dt.data != nullptr && call.B.data != nullptr && call.C.data != nullptr, "ssm1 takes dt, B and C");
  const int64_t matrix[2] = {call.channels, call.state}, states[3] = {call.batch, call.channels, call.state};
  call.A = state_of(A, 2, matrix, "ssm1: A is (C, N) of float32");
  require(call.A != nullptr, "ssm1: A is (C, N) of float32");
  call.documents = documents_of(documents, call.batch, call.length, "ssm1: documents are (B, T) of int64");
  call.initial = state_of(initial, 3, states, "ssm1: the state is (B, C, N) of float32");
  return call;
}

}  // namespace easytorch
