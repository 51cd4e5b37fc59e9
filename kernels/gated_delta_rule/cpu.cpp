// The operator easytorch_cpu::gated_delta_rule.
#include "cpu_delta.h"

#include "../cpu/levels.h"
#include "../cpu/sequences.h"
#include "../cpu/tasks.h"

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
  require(query.dim == 4 && value.dim == 4, "gated_delta_rule takes query and value of four dimensions");
  DeltaCall call{};
  call.batch = query.sizes[0], call.length = query.sizes[1], call.heads = query.sizes[2], call.key_width = query.sizes[3];
  call.value_heads = value.sizes[2], call.value_width = value.sizes[3];
  require(call.length > 0 && call.key_width > 0 && call.value_width > 0 && call.heads > 0 && call.value_heads > 0 &&
              call.value_heads % call.heads == 0,
          "gated_delta_rule takes tokens, and value heads a multiple of the heads");
  call.query = sequence_of(query, call.batch, call.length, call.heads, call.key_width,
                           "gated_delta_rule: query is (B, T, H, Dk)");
  call.key = sequence_of(key, call.batch, call.length, call.heads, call.key_width, "gated_delta_rule: key is (B, T, H, Dk)");
  call.value = sequence_of(value, call.batch, call.length, call.value_heads, call.value_width,
                           "gated_delta_rule: value is (B, T, Hv, Dv)");
  call.g = sequence_of(g, call.batch, call.length, 0, call.value_heads, "gated_delta_rule: g is (B, T, Hv)");
  call.beta = sequence_of(beta, call.batch, call.length, 0, call.value_heads, "gated_delta_rule: beta is (B, T, Hv)");
  require(call.key.data != nullptr && call.g.data != nullptr && call.beta.data != nullptr,
          "gated_delta_rule takes key, g and beta");
  call.scale = static_cast<float>(scale), call.epsilon = static_cast<float>(epsilon), call.normalized = normalized;
  call.documents = documents_of(documents, call.batch, call.length, "gated_delta_rule: documents are (B, T) of int64");
  const int64_t states[4] = {call.batch, call.value_heads, call.key_width, call.value_width};
  call.initial = state_of(initial, 4, states, "gated_delta_rule: the state is (B, Hv, Dk, Dv) of float32");
  Tensor output(empty(4, value.sizes, value.dtype)), final(empty(4, states, aoti_torch_dtype_float32()));
  call.output = output.data, call.final = static_cast<float*>(final.data);

  const DeltaFunctions& functions = delta_of(level);
  const bool few = call.length <= FEW;
  const int64_t heads = few ? call.value_heads : call.heads, shared = call.value_heads / heads;
  const int64_t work = call.length * call.key_width * call.value_width * shared / 4;
  run_tasks(call.batch * heads, work, functions.scratch(&call), [&](int64_t task, float* scratch) {
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
