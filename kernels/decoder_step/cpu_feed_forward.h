// A decoder layer's feed-forward network with its norm and residual, for one token of each row: one parallel region.
#pragma once

#include "../glu/cpu_gate.h"
#include "cpu_hidden.h"

EASYTORCH_TABLE(GateFunctions, gate)

namespace easytorch {
namespace {

// norm (D,); gate and up (N, D), down (D, N).
struct FeedForwardWeights {
  template <class Reader>
  explicit FeedForwardWeights(Reader& from)
      : norm(from.tensor()), gate(from), up(from), down(from), eps(from.number()), activation(from.integer()) {}

  const Tensor norm;
  const Projection gate, up, down;
  const double eps;
  const int64_t activation;
};

// x + down(unit(gate(norm(x))) * up(norm(x))).
uint64_t feed_forward(const Tensor& hidden, const FeedForwardWeights& weights, const Run& how) {
  const Projection &gate = weights.gate, &up = weights.up, &down = weights.down;
  const int64_t activation = weights.activation, threads = how.threads, level = how.level;
  const Hidden x(hidden);
  const int64_t inner = gate.weight.dim == 2 ? gate.rows() : 0, size = size_of(x.dtype);
  require(gate.fits(inner, x.width, hidden.dtype) && up.fits(inner, x.width, hidden.dtype) &&
              down.fits(x.width, inner, hidden.dtype),
          "feed_forward_step: the projections do not fit");
  require(activation >= SILU && activation <= GELU_TANH && threads > 0, "feed_forward_step: no such activation or threads");
  Tensor y(empty(3, hidden.sizes, hidden.dtype));
  const GateFunctions& unit = gate_of(level);
  const StepFunctions& step = step_of(level);
  const NormalizedRows rows(x, weight_of(weights.norm, x.width, hidden), weights.eps, level, threads, {&gate, &up});
  const PackedRows inner_rows(level, x.rows, inner, x.dtype, threads, {&down});
  const Buffer gates = lines(x.rows * inner * size), ups = lines(x.rows * inner * size);
  Phase opening(gate.tasks(), threads), closing(down.tasks(), threads);
  parallel_for(threads, 1, [&](int64_t thread, int64_t) {
    const PackedRows::Packed normalized = rows.make(thread);
    const Product to_gate = rows.packed.product(normalized, 0, gates.get());
    const Product to_up = rows.packed.product(normalized, 1, ups.get());
    opening.run(thread, [&](int64_t task) {
      const Block block(gate, task);
      to_gate.run(block.begin, block.end);
      to_up.run(block.begin, block.end);
      for (int64_t m = 0; m < x.rows; ++m) {
        const int64_t at = (m * inner + block.begin) * size;
        unit.run(gates.get() + at, ups.get() + at, gates.get() + at, block.end - block.begin, x.dtype, activation);
      }
    });
    const Product to_hidden = inner_rows.product(inner_rows.pack(gates.get(), thread), 0, y.data);
    closing.run(thread, [&](int64_t task) { add_residual(step, to_hidden, x, down, task); });
  });
  return y.release();
}

}  // namespace
}  // namespace easytorch
