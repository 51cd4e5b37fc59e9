// The operator easytorch_cpu::gated_delta_rule.
#include "cpu_delta.h"

#include "../cpu/levels.h"
#include "../cpu/subnormals.h"
#include "../cpu/tasks.h"
#include "cpu_delta_call.h"

EASYTORCH_TABLE(DeltaFunctions, delta)

namespace easytorch {
namespace {

// Tokens up to which a state is updated token by token: it is read where it lies.
constexpr int64_t FEW = 2;

// query, key (B, T, H, Dk), value (B, T, Hv, Dv), g and beta (B, T, Hv), initial (B, Hv, Dk, Dv) float32, documents (B, T)
// int64; an absent one is (0,) -> outputs as value, the last state.
void gated_delta_rule(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor query(stack[0]), key(stack[1]), value(stack[2]), g(stack[3]), beta(stack[4]), initial(stack[5]);
  const Tensor documents(stack[6]);
  const double scale = number_of(stack[7]), epsilon = number_of(stack[9]);
  const bool normalized = stack[8] != 0;
  const int64_t level = static_cast<int64_t>(stack[10]);
  DeltaCall call = delta_call(query, key, value, g, beta, initial, documents);
  call.scale = static_cast<float>(scale), call.epsilon = static_cast<float>(epsilon), call.normalized = normalized;
  const int64_t states[4] = {call.batch, call.value_heads, call.key_width, call.value_width};
  Tensor output(empty(4, value.sizes, value.dtype)), final(empty(4, states, aoti_torch_dtype_float32()));
  call.output = output.data, call.final = static_cast<float*>(final.data);

  const DeltaFunctions& functions = delta_of(level);
  const bool few = call.length <= FEW;
  const int64_t heads = few ? call.value_heads : call.heads, shared = call.value_heads / heads;
  const int64_t work = call.length * call.key_width * call.value_width * shared / 4;
  run_tasks(call.batch * heads, work, functions.scratch(&call), [&](int64_t task, float* scratch) {
    const FlushSubnormals flushed;
    (few ? functions.step : functions.chunks)(&call, task / heads, task % heads, scratch);
  });
  stack[0] = output.release();
  stack[1] = final.release();
}

}  // namespace

void register_gated_delta_rule(Library& library) {
  library.define(
      "gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor initial, Tensor documents, "
      "float scale, bool normalized, float epsilon, int level) -> (Tensor, Tensor)",
      "gated_delta_rule", gated_delta_rule);
}

}  // namespace easytorch
