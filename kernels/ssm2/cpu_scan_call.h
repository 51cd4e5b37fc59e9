// The tensors of a scan of Mamba-2, checked.
#pragma once

#include "../cpu/sequences.h"
#include "cpu_scan.h"

namespace easytorch {

// x (B, T, H, P), dt (B, T, H), A (H,) float32, B and C (B, T, G, N), D (H,) or (H, P), z as x, initial (B, H, P, N)
// float32, documents (B, T) int64; an absent one is (0,). Without dt_bias, softplus, limits and results.
inline Ssm2Call ssm2_call(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B, const Tensor& C,
                          const Tensor& D, const Tensor& z, const Tensor& initial, const Tensor& documents) {
  require(x.dim == 4 && B.dim == 4, "ssm2 takes x and B of four dimensions");
  Ssm2Call call{};
  call.batch = x.sizes[0], call.length = x.sizes[1], call.heads = x.sizes[2], call.width = x.sizes[3];
  call.groups = B.sizes[2], call.state = B.sizes[3];
  require(call.length > 0 && call.width > 0 && call.state > 0 && call.groups > 0 && call.heads % call.groups == 0,
          "ssm2 takes tokens, and heads a multiple of the groups");
  call.x = sequence_of(x, call.batch, call.length, call.heads, call.width, "ssm2: x is (B, T, H, P)");
  call.z = sequence_of(z, call.batch, call.length, call.heads, call.width, "ssm2: z is (B, T, H, P)");
  call.B = sequence_of(B, call.batch, call.length, call.groups, call.state, "ssm2: B is (B, T, G, N)");
  call.C = sequence_of(C, call.batch, call.length, call.groups, call.state, "ssm2: C is (B, T, G, N)");
  call.dt = sequence_of(dt, call.batch, call.length, 0, call.heads, "ssm2: dt is (B, T, H)");
  require(call.x.data != nullptr && call.B.data != nullptr && call.C.data != nullptr && call.dt.data != nullptr,
          "ssm2 takes x, dt, B and C");
  require(A.dim == 1 && A.sizes[0] == call.heads && A.dtype == aoti_torch_dtype_float32() && A.contiguous(),
          "ssm2: A is (H,) of float32");
  call.A = static_cast<const float*>(A.data);
  if (D.dim == 2) {
    require(D.sizes[0] == call.heads && D.sizes[1] == call.width && D.contiguous() && element_of(D.dtype) >= 0,
            "ssm2: D is (H,) or (H, P)");
    call.D = {D.data, element_of(D.dtype), 0, 1, call.width};
  } else {
    call.D = vector_of(D, call.heads, "ssm2: D is (H,) or (H, P)");
  }
  call.documents = documents_of(documents, call.batch, call.length, "ssm2: documents are (B, T) of int64");
  const int64_t states[4] = {call.batch, call.heads, call.width, call.state};
  call.initial = state_of(initial, 4, states, "ssm2: the state is (B, H, P, N) of float32");
  return call;
}

}  // namespace easytorch
