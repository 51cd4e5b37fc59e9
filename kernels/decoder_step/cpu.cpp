// The operators easytorch_cpu::attention_step, of a cache or of pages, and easytorch_cpu::feed_forward_step: a decoder
// layer's two halves for one token of each row, each one parallel region; and easytorch_cpu::decoder_layers, of a cache or of
// pages: many layers of both, one after another.
#include "cpu_arguments.h"
#include "cpu_attention.h"
#include "cpu_feed_forward.h"

namespace easytorch {
namespace {

void feed_forward_step(uint64_t* stack, uint64_t, uint64_t) {
  StackReader from(stack);
  const Tensor x(from.tensor());
  const FeedForwardWeights weights(from);
  stack[0] = feed_forward(x, weights, Run(from));
}

void attention_step(uint64_t* stack, uint64_t, uint64_t) {
  StackReader from(stack);
  const Tensor x(from.tensor());
  const AttentionWeights weights(from);
  const Rotation rotation(from);
  const Tensor keys(from.tensor()), values(from.tensor());
  const AttentionCall given(from.skip(AttentionCall::FIELDS));
  const Place place(from);
  stack[0] = attend_dense(x, weights, rotation, keys, values, given, place, Run(from));
}

void attention_step_pages(uint64_t* stack, uint64_t, uint64_t) {
  StackReader from(stack);
  const Tensor x(from.tensor());
  const AttentionWeights weights(from);
  const Rotation rotation(from);
  const PagesOfTokens pages(from);
  const AttentionCall given(from.skip(AttentionCall::FIELDS));
  stack[0] = attend_pages(x, weights, rotation, pages, given, Run(from));
}

// What many layers are given: the hidden states, the weights of all, and the lists of their memory.
struct LayersReader {
  explicit LayersReader(uint64_t* stack)
      : hidden(stack[0]), weights(stack[1], stack[2], stack[3]), memory(stack[4], stack[5]), run(stack[6], stack[7]) {}

  // Both halves of layer after layer. attend(x, weights): a layer's attention, which reads the rest of what is the layer's.
  template <class Attend>
  uint64_t each(const Attend& attend) {
    uint64_t between = hidden;
    do {
      const Tensor x(between);
      const AttentionWeights attention(weights);
      const Tensor attended(attend(x, attention));
      between = feed_forward(attended, FeedForwardWeights(weights), run);
    } while (!weights.at_end());
    Tensor y(between);
    require(memory.at_end(), "decoder_layers: there is memory of more layers than there are weights");
    return y.release();
  }

  uint64_t hidden;
  ListReader weights, memory;
  const Run run;
};

void decoder_layers(uint64_t* stack, uint64_t, uint64_t) {
  LayersReader layers(stack);
  stack[0] = layers.each([&](const Tensor& x, const AttentionWeights& weights) {
    const Rotation rotation(layers.memory);
    const Tensor keys(layers.memory.tensor()), values(layers.memory.tensor()), mask(layers.memory.tensor());
    const Tensor sinks(layers.weights.tensor());
    const double scale = layers.weights.number(), softcap = layers.weights.number();
    const AttentionCall given(&mask, sinks, scale, softcap, UNBOUNDED, UNBOUNDED);
    return attend_dense(x, weights, rotation, keys, values, given, Place(layers.memory), layers.run);
  });
}

void decoder_layers_pages(uint64_t* stack, uint64_t, uint64_t) {
  LayersReader layers(stack);
  stack[0] = layers.each([&](const Tensor& x, const AttentionWeights& weights) {
    const Rotation rotation(layers.memory);
    const PagesOfTokens pages(layers.memory);
    const Tensor sinks(layers.weights.tensor());
    const double scale = layers.weights.number(), softcap = layers.weights.number();
    const int64_t left = layers.memory.integer();
    const AttentionCall given(nullptr, sinks, scale, softcap, left < 0 ? UNBOUNDED : left, 0);
    return attend_pages(x, weights, rotation, pages, given, layers.run);
  });
}

}  // namespace

#define ATTENTION_STEP                                                                                                  \
  "Tensor x, Tensor norm, " PROJECTION("query") ", " PROJECTION("key") ", " PROJECTION("value") ", " PROJECTION("output") \
  ", Tensor query_norm, Tensor key_norm, float eps, float head_eps, Tensor cos, Tensor sin, Tensor(a!) keys, "           \
  "Tensor(b!) values, "
// Weights, formats and numbers as the halves have them; after a layer's attention its sinks, scale and softcap, 0 for none.
#define DECODER_LAYERS                                                                                                  \
  "Tensor x, Tensor[] weights, int[] formats, float[] numbers, Tensor(a!)[] memory, int[] places, int threads, int level"

void register_decoder_step(Library& library) {
  library.define("attention_step(" ATTENTION_STEP ATTENTION_CALL
                 ", int first, int slot, int end, int threads, int level) -> Tensor",
                 "attention_step", attention_step);
  library.define("attention_step_pages(" ATTENTION_STEP
                 "Tensor slots, Tensor context_lens, Tensor block_tables, Tensor query_start_loc, " ATTENTION_CALL
                 ", int threads, int level) -> Tensor",
                 "attention_step_pages", attention_step_pages);
  library.define(
      "feed_forward_step(Tensor x, Tensor norm, " PROJECTION("gate") ", " PROJECTION("up") ", " PROJECTION("down")
      ", float eps, int activation, int threads, int level) -> Tensor",
      "feed_forward_step", feed_forward_step);
  library.define("decoder_layers(" DECODER_LAYERS ") -> Tensor", "decoder_layers", decoder_layers);
  library.define("decoder_layers_pages(" DECODER_LAYERS ") -> Tensor", "decoder_layers_pages", decoder_layers_pages);
}

}  // namespace easytorch
