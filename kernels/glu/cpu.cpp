// The operators easytorch_cpu::glu and easytorch_cpu::glu_backward.
#include "cpu_gate.h"

#include "../cpu/levels.h"
#include "../cpu/torch_abi.h"

EASYTORCH_TABLE(GateFunctions, gate)

namespace easytorch {
namespace {

// Numbers below which another thread would cost more than it saves.
constexpr int64_t GRAIN = 1 << 13;

// Rows of N numbers that lie side by side, of one shape and dtype.
struct Rows {
  int64_t n, count, size;
  int32_t dtype;
};

Rows rows_of(const Tensor& gate, const Tensor& up, int64_t activation) {
  require(gate.dim >= 1 && gate.dim == up.dim, "glu takes gate and up (..., N)");
  for (int64_t d = 0; d < gate.dim; ++d) require(gate.sizes[d] == up.sizes[d], "glu: gate and up do not fit");
  const int64_t last = gate.dim - 1, n = gate.sizes[last], rows = n == 0 ? 0 : gate.numel() / n;
  require(n <= 1 || (gate.strides[last] == 1 && up.strides[last] == 1), "glu: the last dimension must be contiguous");
  require(activation >= SILU && activation <= GELU_TANH, "glu: the activation is 0 (silu), 1 (gelu) or 2 (gelu by tanh)");
  const int32_t dtype = element_of(gate.dtype);
  require(dtype >= 0 && gate.dtype == up.dtype, "glu takes one dtype: float32, bfloat16 or float16");
  return {n, rows, dtype == FLOAT32 ? 4 : 2, dtype};
}

inline char* row_at(const Tensor& tensor, int64_t row, int64_t size) {
  return static_cast<char*>(tensor.data) + row_offset(tensor, row) * size;
}

// gate and up (..., N), the last dimension contiguous -> activation(gate) * up (..., N).
void glu(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor gate(stack[0]), up(stack[1]);
  const int64_t activation = static_cast<int64_t>(stack[2]), level = static_cast<int64_t>(stack[3]);
  const Rows rows = rows_of(gate, up, activation);
  Tensor y(empty_like_rows(gate, rows.n));
  const GateFunctions& functions = gate_of(level);
  parallel_for(rows.count, 1 + GRAIN / (rows.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      functions.run(row_at(gate, row, rows.size), row_at(up, row, rows.size),
                    static_cast<char*>(y.data) + row * rows.n * rows.size, rows.n, rows.dtype, activation);
    }
  });
  stack[0] = y.release();
}

// The gradient of that, gate and up -> the gradients of gate and up.
void glu_backward(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor grad(stack[0]), gate(stack[1]), up(stack[2]);
  const int64_t activation = static_cast<int64_t>(stack[3]), level = static_cast<int64_t>(stack[4]);
  const Rows rows = rows_of(gate, up, activation);
  rows_of(grad, gate, activation);
  Tensor gate_grad(empty_like_rows(gate, rows.n)), up_grad(empty_like_rows(gate, rows.n));
  const GateFunctions& functions = gate_of(level);
  parallel_for(rows.count, 1 + GRAIN / (rows.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t to = row * rows.n * rows.size;
      functions.backward(row_at(grad, row, rows.size), row_at(gate, row, rows.size), row_at(up, row, rows.size),
                         static_cast<char*>(gate_grad.data) + to, static_cast<char*>(up_grad.data) + to, rows.n, rows.dtype,
                         activation);
    }
  });
  stack[0] = gate_grad.release(), stack[1] = up_grad.release();
}

}  // namespace

void register_glu(Library& library) {
  library.define("glu(Tensor gate, Tensor up, int activation, int level) -> Tensor", "glu", glu);
  library.define(
      "glu_backward(Tensor grad, Tensor gate, Tensor up, int activation, int level) -> (Tensor, Tensor)", "glu_backward",
      glu_backward);
}

}  // namespace easytorch
