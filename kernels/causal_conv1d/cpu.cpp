// The operator easytorch_cpu::causal_conv1d.
#include "../cpu/levels.h"
#include "cpu_convolution_call.h"

EASYTORCH_TABLE(ConvolutionFunctions, convolution)

namespace easytorch {
namespace {

// Numbers below which another thread would cost more than it saves.
constexpr int64_t GRAIN = 1 << 13;

// x (B, T, C), weight (C, W), bias (C,), initial (B, C, W - 1) float32, documents (B, T) int64; an absent one is (0,) ->
// outputs as x, the last W - 1 tokens (B, C, W - 1).
void causal_conv1d(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), weight(stack[1]), bias(stack[2]), initial(stack[3]), documents(stack[4]);
  const bool silu = stack[5] != 0;
  const int64_t level = static_cast<int64_t>(stack[6]);
  Convolution given(x, weight, bias, initial, documents, silu);
  ConvolutionCall& call = given.call;
  const int64_t states[3] = {call.batch, call.channels, call.width - 1};
  Tensor output(empty(3, x.sizes, x.dtype)), final(empty(3, states, aoti_torch_dtype_float32()));
  call.output = output.data, call.final = static_cast<float*>(final.data);

  const ConvolutionFunctions& functions = convolution_of(level);
  given.prepare(functions);
  parallel_for(call.batch * call.length, 1 + GRAIN / call.channels, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const int64_t b = at / call.length, first = at - b * call.length;
      const int64_t last = end - b * call.length < call.length ? end - b * call.length : call.length;
      functions.run(&call, b, first, last);
      at += last - first;
    }
  });
  for (int64_t b = 0; b < call.batch; ++b) functions.keep(&call, b);
  stack[0] = output.release();
  stack[1] = final.release();
}

}  // namespace

void register_causal_conv1d(Library& library) {
  library.define(
      "causal_conv1d(Tensor x, Tensor weight, Tensor bias, Tensor initial, Tensor documents, bool silu, int level) -> "
      "(Tensor, Tensor)",
      "causal_conv1d", causal_conv1d);
}

}  // namespace easytorch
