// The operator easytorch_cpu::flash_backward.
#include "cpu_flash_backward.h"

#include <memory>

#include "../cpu/levels.h"
#include "../cpu/tasks.h"
#include "cpu_flash_call.h"

EASYTORCH_TABLE(FlashGradient, flash_gradient)

namespace easytorch {
namespace {

FlashTensor like_output(const Tensor& tensor, const FlashCall& call, int32_t dtype) {
  require(tensor.dim == 4 && tensor.dtype == dtype && tensor.sizes[0] == call.batch && tensor.sizes[1] == call.length &&
              tensor.sizes[2] == call.heads && tensor.sizes[3] == call.value_dim,
          "flash_backward: output and its gradient do not fit");
  return heads_of(tensor);
}

void zero(const Tensor& tensor) {
  const size_t size = tensor.dtype == aoti_torch_dtype_float32() ? 4 : 2;
  if (tensor.numel() > 0) memset(tensor.data, 0, static_cast<size_t>(tensor.numel()) * size);
}

// The gradient of the output (B, T, H, Dv), query, key, value, output, logsumexp (B, H, T) and the record of the call ->
// the gradients of query, key, value and sinks, the last (H,) in float32, or (0,) without sinks.
void flash_backward(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor grad(stack[0]), query(stack[1]), key(stack[2]), value(stack[3]), output(stack[4]), logsumexp(stack[5]);
  const AttentionCall given(stack + 6, true);
  const int64_t level = static_cast<int64_t>(stack[6 + AttentionCall::FIELDS]);
  FlashGradientCall work{};
  std::optional<Segments> segments;
  work.call = flash_call(query, key, value, given, segments);
  const FlashCall& call = work.call;
  work.grad = like_output(grad, call, query.dtype), work.output = like_output(output, call, query.dtype);
  require(logsumexp.dim == 3 && logsumexp.sizes[0] == call.batch && logsumexp.sizes[1] == call.heads &&
              logsumexp.sizes[2] == call.length && (logsumexp.numel() == 0 || logsumexp.contiguous()) && logsumexp.dtype == aoti_torch_dtype_float32(),
          "flash_backward: logsumexp is (B, H, T), contiguous, float32");
  work.logsumexp = static_cast<const float*>(logsumexp.data);
  Tensor grad_query(empty(4, query.sizes, query.dtype)), grad_key(empty(4, key.sizes, query.dtype));
  Tensor grad_value(empty(4, value.sizes, query.dtype));
  work.grad_query = grad_query.data, work.grad_key = grad_key.data, work.grad_value = grad_value.data;
  const int64_t sinks = call.rules.sinks == nullptr ? 0 : call.heads, pairs = call.batch * call.kv_heads;
  Tensor grad_sinks(empty(1, &sinks, aoti_torch_dtype_float32()));
  const std::unique_ptr<float[]> of_heads(new float[static_cast<size_t>(call.batch * call.heads)]());
  work.grad_sinks = of_heads.get();
  if (query.numel() == 0 || key.numel() == 0 || value.numel() == 0) {
    zero(grad_query), zero(grad_key), zero(grad_value);
  } else {
    const FlashGradient& functions = flash_gradient_of(level);
    const int64_t numbers = (functions.scratch(&work) + 3) / 4, group = call.heads / call.kv_heads;
    run_tasks(pairs, group * call.length * call.keys, numbers, [&](int64_t pair, float* scratch) {
      functions.run(&work, pair / call.kv_heads, pair % call.kv_heads, reinterpret_cast<char*>(scratch));
    });
  }
  float* const of_sinks = static_cast<float*>(grad_sinks.data);
  for (int64_t h = 0; h < sinks; ++h) {
    of_sinks[h] = 0.0f;
    for (int64_t b = 0; b < call.batch; ++b) of_sinks[h] += of_heads[static_cast<size_t>(b * call.heads + h)];
  }
  stack[0] = grad_query.release(), stack[1] = grad_key.release();
  stack[2] = grad_value.release(), stack[3] = grad_sinks.release();
}

}  // namespace

void register_flash_backward(Library& library) {
  library.define(
      "flash_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp, " ATTENTION_CALL
      ", int level) -> (Tensor, Tensor, Tensor, Tensor)",
      "flash_backward", flash_backward);
}

}  // namespace easytorch
