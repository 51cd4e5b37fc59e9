// The operator easytorch_cpu::glu.
#include "cpu_gate.h"

#include "../cpu/levels.h"
#include "../cpu/torch_abi.h"

EASYTORCH_TABLE(GateFunctions, gate)

namespace easytorch {
namespace {

// Numbers below which another thread would cost more than it saves.
constexpr int64_t GRAIN = 1 << 13;

// gate and up (..., N), the last dimension contiguous -> activation(gate) * up (..., N).
void glu(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor gate(stack[0]), up(stack[1]);
  const int64_t activation = static_cast<int64_t>(stack[2]), level = static_cast<int64_t>(stack[3]);
  require(gate.dim >= 1 && gate.dim == up.dim, "glu takes gate and up (..., N)");
  for (int64_t d = 0; d < gate.dim; ++d) require(gate.sizes[d] == up.sizes[d], "glu: gate and up do not fit");
  const int64_t last = gate.dim - 1, n = gate.sizes[last], rows = n == 0 ? 0 : gate.numel() / n;
  require(n <= 1 || (gate.strides[last] == 1 && up.strides[last] == 1), "glu: the last dimension must be contiguous");
  require(activation >= SILU && activation <= GELU_TANH, "glu: the activation is 0 (silu), 1 (gelu) or 2 (gelu by tanh)");
  const int32_t dtype = element_of(gate.dtype);
  require(dtype >= 0 && gate.dtype == up.dtype, "glu takes one dtype: float32, bfloat16 or float16");
  Tensor y(empty_like_rows(gate, n));
  const GateFunctions& functions = gate_of(level);
  const int64_t size = dtype == FLOAT32 ? 4 : 2;
  parallel_for(rows, 1 + GRAIN / (n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      functions.run(static_cast<const char*>(gate.data) + row_offset(gate, row) * size,
                    static_cast<const char*>(up.data) + row_offset(up, row) * size,
                    static_cast<char*>(y.data) + row * n * size, n, dtype, activation);
    }
  });
  stack[0] = y.release();
}

}  // namespace

void register_glu(Library& library) {
  library.define("glu(Tensor gate, Tensor up, int activation, int level) -> Tensor", "glu", glu);
}

}  // namespace easytorch
