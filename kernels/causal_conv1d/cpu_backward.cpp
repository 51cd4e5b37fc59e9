// The operator easytorch_cpu::causal_conv1d_backward.
#include "cpu_convolution_backward.h"

#include "../cpu/levels.h"
#include "../cpu/tasks.h"
#include "cpu_convolution_call.h"

EASYTORCH_TABLE(ConvolutionFunctions, convolution)
EASYTORCH_TABLE(ConvolutionGradient, convolution_gradient)

namespace easytorch {
namespace {

// The gradients of the outputs and of the last tokens, (B, C, W - 1) float32 or (0,), and the tensors of causal_conv1d ->
// the gradients of x, in its dtype, and in float32 of weight, bias and the tokens before the first.
void causal_conv1d_backward(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor grad(stack[0]), final_grad(stack[1]), x(stack[2]), weight(stack[3]), bias(stack[4]), initial(stack[5]);
  const Tensor documents(stack[6]);
  const bool silu = stack[7] != 0;
  const int64_t level = static_cast<int64_t>(stack[8]);
  Convolution given(x, weight, bias, initial, documents, silu);
  given.prepare(convolution_of(level));
  ConvolutionGradientCall work{};
  work.call = given.call;
  const ConvolutionCall& call = work.call;
  work.grad = sequence_of(grad, call.batch, call.length, 0, call.channels,
                          "causal_conv1d_backward: the gradient is (B, T, C)");
  require(work.grad.data != nullptr, "causal_conv1d_backward takes the gradient of the outputs");
  const int64_t states[3] = {call.batch, call.channels, call.width - 1}, matrix[2] = {call.channels, call.width};
  work.final_grad = state_of(final_grad, 3, states, "causal_conv1d_backward: the state's gradient is (B, C, W - 1)");
  const int32_t wide = aoti_torch_dtype_float32();
  Tensor of_x(empty(3, x.sizes, x.dtype)), of_weight(empty(2, matrix, wide)), of_bias(empty(1, matrix, wide));
  Tensor of_initial(empty(3, states, wide));
  const int64_t rows = (call.width + 1) * call.channels;
  const std::unique_ptr<float[]> of_taps(new float[static_cast<size_t>(call.batch * rows)]);
  work.grad_x = of_x.data, work.grad_initial = static_cast<float*>(of_initial.data), work.grad_taps = of_taps.get();

  const ConvolutionGradient& functions = convolution_gradient_of(level);
  const ConvolutionGradientSizes sizes = functions.sizes(&work);
  const int64_t blocks = (call.channels + sizes.channels - 1) / sizes.channels;
  run_tasks(call.batch * blocks, call.length * call.width, sizes.scratch, [&](int64_t task, float* scratch) {
    functions.run(&work, task / blocks, task % blocks * sizes.channels, scratch);
  });
  for (int64_t i = 0; i < call.channels; ++i) {
    for (int64_t w = 0; w <= call.width; ++w) {  // sequence by sequence, whatever the threads
      float total = 0.0f;
      for (int64_t b = 0; b < call.batch; ++b) total += of_taps[static_cast<size_t>(b * rows + w * call.channels + i)];
      if (w < call.width) static_cast<float*>(of_weight.data)[i * call.width + w] = total;
      else static_cast<float*>(of_bias.data)[i] = total;
    }
  }
  stack[0] = of_x.release(), stack[1] = of_weight.release(), stack[2] = of_bias.release(), stack[3] = of_initial.release();
}

}  // namespace

void register_causal_conv1d_backward(Library& library) {
  library.define(
      "causal_conv1d_backward(Tensor grad, Tensor final_grad, Tensor x, Tensor weight, Tensor bias, Tensor initial, Tensor "
      "documents, bool silu, int level) -> (Tensor, Tensor, Tensor, Tensor)",
      "causal_conv1d_backward", causal_conv1d_backward);
}

}  // namespace easytorch
