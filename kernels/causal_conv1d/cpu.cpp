// The operator easytorch_cpu::causal_conv1d.
#include "cpu_convolution.h"

#include <memory>
#include <vector>

#include "../cpu/levels.h"
#include "../cpu/sequences.h"

EASYTORCH_TABLE(ConvolutionFunctions, convolution)

namespace easytorch {
namespace {

// Numbers below which another thread would cost more than it saves.
constexpr int64_t GRAIN = 1 << 13;

// How many tokens before each are of its document, at most `most`; those before the first token are of the first's.
std::vector<int64_t> reach_of(const Documents& documents, int64_t batch, int64_t length, int64_t most) {
  std::vector<int64_t> reach(static_cast<size_t>(batch * length));
  for (int64_t b = 0; b < batch; ++b) {
    int64_t so_far = most;
    for (int64_t t = 0; t < length; ++t) {
      so_far = documents.begins(b, t) ? 0 : so_far < most ? so_far + 1 : most;
      reach[static_cast<size_t>(b * length + t)] = so_far;
    }
  }
  return reach;
}

// x (B, T, C), weight (C, W), bias (C,), initial (B, C, W - 1) float32, documents (B, T) int64; an absent one is (0,) ->
// outputs as x, the last W - 1 tokens (B, C, W - 1).
void causal_conv1d(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), weight(stack[1]), bias(stack[2]), initial(stack[3]), documents(stack[4]);
  const bool silu = stack[5] != 0;
  const int64_t level = static_cast<int64_t>(stack[6]);
  require(x.dim == 3 && weight.dim == 2, "causal_conv1d takes x (B, T, C) and weight (C, W)");
  ConvolutionCall call{};
  call.batch = x.sizes[0], call.length = x.sizes[1], call.channels = x.sizes[2], call.width = weight.sizes[1];
  require(call.length > 0 && call.channels > 0 && call.width > 0, "causal_conv1d takes tokens, channels and taps");
  call.x = sequence_of(x, call.batch, call.length, 0, call.channels, "causal_conv1d: x is (B, T, C)");
  require(call.x.data != nullptr && weight.sizes[0] == call.channels && element_of(weight.dtype) >= 0,
          "causal_conv1d: weight is (C, W)");
  call.weight = {weight.data, element_of(weight.dtype), 0, weight.strides[0], weight.strides[1]};
  call.bias = vector_of(bias, call.channels, "causal_conv1d: bias is (C,)");
  call.silu = silu;
  const int64_t states[3] = {call.batch, call.channels, call.width - 1};
  call.initial = state_of(initial, 3, states, "causal_conv1d: the state is (B, C, W - 1) of float32");
  const Documents ids = documents_of(documents, call.batch, call.length, "causal_conv1d: documents are (B, T) of int64");
  std::vector<int64_t> reach;
  if (ids.ids != nullptr) reach = reach_of(ids, call.batch, call.length, call.width - 1);
  call.reach = ids.ids == nullptr ? nullptr : reach.data();
  Tensor output(empty(3, x.sizes, x.dtype)), final(empty(3, states, aoti_torch_dtype_float32()));
  call.output = output.data, call.final = static_cast<float*>(final.data);

  const ConvolutionFunctions& functions = convolution_of(level);
  const size_t row = static_cast<size_t>(functions.row(&call));
  const std::unique_ptr<float[]> memory(
      new float[row * static_cast<size_t>(call.width + 1 + call.batch * (call.width - 1))]);
  call.taps = memory.get(), call.past = call.taps + row * static_cast<size_t>(call.width + 1);
  functions.prepare(&call);
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
