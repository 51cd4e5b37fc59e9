// The operator easytorch_cpu::gated_delta_rule_backward.
#include "cpu_delta_backward.h"

#include "../cpu/levels.h"
#include "../cpu/subnormals.h"
#include "../cpu/tasks.h"
#include "cpu_delta_call.h"

EASYTORCH_TABLE(DeltaGradient, delta_gradient)

namespace easytorch {
namespace {

// The gradients of the outputs and of the last state, (B, Hv, Dk, Dv) float32 or (0,), and the tensors of
// gated_delta_rule without normalization -> the gradients of query, key, value, g, beta and the first state, float32.
void gated_delta_rule_backward(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor grad(stack[0]), final_grad(stack[1]), query(stack[2]), key(stack[3]), value(stack[4]), g(stack[5]);
  const Tensor beta(stack[6]), initial(stack[7]), documents(stack[8]);
  const double scale = number_of(stack[9]);
  const int64_t level = static_cast<int64_t>(stack[10]);
  DeltaGradientCall work{};
  work.call = delta_call(query, key, value, g, beta, initial, documents);
  const DeltaCall& call = work.call;
  work.call.scale = static_cast<float>(scale);
  work.grad = sequence_of(grad, call.batch, call.length, call.value_heads, call.value_width,
                          "gated_delta_rule_backward: the gradient is (B, T, Hv, Dv)");
  require(work.grad.data != nullptr, "gated_delta_rule_backward takes the gradient of the outputs");
  const int64_t states[4] = {call.batch, call.value_heads, call.key_width, call.value_width};
  work.final_grad = state_of(final_grad, 4, states, "gated_delta_rule_backward: the state's gradient is (B, Hv, Dk, Dv)");
  const int64_t scalars[3] = {call.batch, call.length, call.value_heads};
  const int32_t wide = aoti_torch_dtype_float32();
  Tensor of_query(empty(4, query.sizes, wide)), of_key(empty(4, query.sizes, wide)), of_value(empty(4, value.sizes, wide));
  Tensor of_g(empty(3, scalars, wide)), of_beta(empty(3, scalars, wide)), of_initial(empty(4, states, wide));
  const auto numbers = [](const Tensor& tensor) { return static_cast<float*>(tensor.data); };
  work.grad_query = numbers(of_query), work.grad_key = numbers(of_key), work.grad_value = numbers(of_value);
  work.grad_g = numbers(of_g), work.grad_beta = numbers(of_beta), work.grad_initial = numbers(of_initial);

  const DeltaGradient& functions = delta_gradient_of(level);
  const int64_t each = call.length * call.key_width * call.value_width * (call.value_heads / call.heads);
  run_tasks(call.batch * call.heads, each, functions.scratch(&work), [&](int64_t task, float* scratch) {
    const FlushSubnormals flushed;
    functions.run(&work, task / call.heads, task % call.heads, scratch);
  });
  stack[0] = of_query.release(), stack[1] = of_key.release(), stack[2] = of_value.release();
  stack[3] = of_g.release(), stack[4] = of_beta.release(), stack[5] = of_initial.release();
}

}  // namespace

void register_gated_delta_rule_backward(Library& library) {
  library.define(
      "gated_delta_rule_backward(Tensor grad, Tensor final_grad, Tensor query, Tensor key, Tensor value, Tensor g, Tensor "
      "beta, Tensor initial, Tensor documents, float scale, int level) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
      "gated_delta_rule_backward", gated_delta_rule_backward);
}

}  // namespace easytorch
