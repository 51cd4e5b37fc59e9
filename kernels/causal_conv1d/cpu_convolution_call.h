// The tensors of a causal convolution, checked.
#pragma once

#include <memory>
#include <vector>

#include "../cpu/sequences.h"
#include "cpu_convolution.h"

namespace easytorch {

// How many tokens before each are of its document, at most `most`; those before the first token are of the first's.
inline std::vector<int64_t> reach_of(const Documents& documents, int64_t batch, int64_t length, int64_t most) {
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

// A call without results, and the memory that it reads.
class Convolution {
 public:
  // x (B, T, C), weight (C, W), bias (C,), initial (B, C, W - 1) float32, documents (B, T) int64; an absent one is (0,).
  Convolution(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& initial, const Tensor& documents,
              bool silu) {
    require(x.dim == 3 && weight.dim == 2, "causal_conv1d takes x (B, T, C) and weight (C, W)");
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
    if (ids.ids != nullptr) reach_ = reach_of(ids, call.batch, call.length, call.width - 1);
    call.reach = ids.ids == nullptr ? nullptr : reach_.data();
  }

  // Taps and past, by the functions of an instruction set.
  void prepare(const ConvolutionFunctions& functions) {
    const size_t row = static_cast<size_t>(functions.row(&call));
    memory_.reset(new float[row * static_cast<size_t>(call.width + 1 + call.batch * (call.width - 1))]);
    call.taps = memory_.get(), call.past = call.taps + row * static_cast<size_t>(call.width + 1);
    functions.prepare(&call);
  }

  ConvolutionCall call{};

 private:
  std::vector<int64_t> reach_;
  std::unique_ptr<float[]> memory_;
};

}  // namespace easytorch
