// An attention call as its operators receive it: the record of call.py, field by field, after the tensors.
#pragma once

#include "../cpu/skinny.h"
#include "../cpu/torch_abi.h"
#include "cpu_scores.h"

// The fields as arguments of a schema, in the order of the record.
#define ATTENTION_CALL                                                                                                 \
  "Tensor? mask, Tensor? bias, Tensor? query_segment_ids, Tensor? key_segment_ids, Tensor? sinks, Tensor? seed, "      \
  "float scale, int? left, int? right, float? softcap, float dropout_prob"

namespace easytorch {

// How far a side of a band reaches that has no bound: further than any sequence, and no sum with it overflows.
constexpr int64_t UNBOUNDED = int64_t{1} << 40;

inline int64_t side_of(uint64_t value) {
  const int64_t side = static_cast<int64_t>(given(value).value_or(UNBOUNDED));
  require(-UNBOUNDED <= side && side <= UNBOUNDED, "attention: a band reaches too far");
  return side;
}

class AttentionCall {
 public:
  static constexpr int FIELDS = 11;

  // stack: from the first field on. many: of many queries, which alone have segments and dropout.
  explicit AttentionCall(const uint64_t* stack, bool many = false)
      : mask(stack[0]), bias(stack[1]), query_segment_ids(stack[2]), key_segment_ids(stack[3]), sinks(stack[4]),
        seed(stack[5]), scale(number_of(stack[6])), left(side_of(stack[7])), right(side_of(stack[8])),
        softcap(number_of(given(stack[9]).value_or(0))), dropout_prob(number_of(stack[10])) {
    require(many || (!query_segment_ids && !key_segment_ids), "attention: segments are given as a mask");
    require(many || (!seed && dropout_prob == 0.0), "attention: this operator has no dropout");
  }

  // Of a step with a mask and sinks alone, which outlive it; null or empty: none. softcap: 0 for none.
  AttentionCall(const Tensor* mask, const Tensor& sinks, double scale, double softcap, int64_t left, int64_t right)
      : mask(mask), sinks(&sinks), scale(scale), left(left), right(right), softcap(softcap), dropout_prob(0) {}

  // What becomes of the scores (B, H, T, S), to which mask and bias broadcast.
  ScoreRules rules(int64_t batch, int64_t heads, int64_t rows, int64_t keys) const {
    const int64_t shape[4] = {batch, heads, rows, keys};
    ScoreRules rules{};
    rules.scale = static_cast<float>(scale), rules.softcap = static_cast<float>(softcap);
    if (mask) {
      require(mask->dtype == aoti_torch_dtype_bool(), "attention: a mask is boolean");
      rules.mask = broadcast(*mask, shape);
    }
    if (bias) rules.bias = broadcast(*bias, shape), rules.bias_dtype = element(*bias);
    if (sinks) {
      require(sinks->dim == 1 && sinks->sizes[0] == heads && sinks->contiguous(), "attention: sinks are (H,)");
      rules.sinks = sinks->data, rules.sinks_dtype = element(*sinks);
    }
    return rules;
  }

  const OptionalTensor mask, bias, query_segment_ids, key_segment_ids, sinks, seed;
  const double scale;
  const int64_t left, right;  // UNBOUNDED where the side has no bound
  const double softcap;       // 0: none
  const double dropout_prob;

 private:
  static ScoreMatrix broadcast(const Tensor& tensor, const int64_t* shape) {
    require(tensor.dim <= 4, "attention: mask and bias broadcast to (B, H, T, S)");
    int64_t strides[4] = {0, 0, 0, 0};
    for (int64_t d = 0; d < tensor.dim; ++d) {
      const int64_t of = 4 - tensor.dim + d;
      require(tensor.sizes[d] == shape[of] || tensor.sizes[d] == 1, "attention: mask and bias broadcast to (B, H, T, S)");
      strides[of] = tensor.sizes[d] == 1 ? 0 : tensor.strides[d];
    }
    return {tensor.data, strides[0], strides[1], strides[2], strides[3]};
  }
  static int32_t element(const Tensor& tensor) {
    const int32_t dtype = element_of(tensor.dtype);
    require(dtype >= 0, "attention: bias and sinks are of float32, bfloat16 or float16");
    return dtype;
  }
};

}  // namespace easytorch
