// The tensors of a call of many queries, checked.
#pragma once

#include "cpu_call.h"
#include "cpu_flash.h"
#include "cpu_segments.h"

namespace easytorch {

inline FlashTensor heads_of(const Tensor& tensor) {
  require(tensor.sizes[3] <= 1 || tensor.strides[3] == 1, "flash: the last dimension must be contiguous");
  return {tensor.data, tensor.strides[0], tensor.strides[2], tensor.strides[1]};
}

// query (B, T, H, D), key (B, S, K, D), value (B, S, K, Dv); without output and memory. segments: keeps those of the call.
inline FlashCall flash_call(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionCall& given,
                            std::optional<Segments>& segments) {
  require(query.dim == 4 && key.dim == 4 && value.dim == 4, "flash takes query, key and value of four dimensions");
  FlashCall call{};
  call.batch = query.sizes[0], call.length = query.sizes[1], call.heads = query.sizes[2], call.dim = query.sizes[3];
  call.keys = key.sizes[1], call.kv_heads = key.sizes[2], call.value_dim = value.sizes[3];
  require(call.dim > 0 && call.kv_heads > 0 && call.heads > 0 && call.heads % call.kv_heads == 0,
          "flash takes heads a multiple of those of the keys");
  require(key.sizes[0] == call.batch && key.sizes[3] == call.dim && value.sizes[0] == call.batch &&
              value.sizes[1] == call.keys && value.sizes[2] == call.kv_heads,
          "flash: query, key and value do not fit");
  require(key.dtype == query.dtype && value.dtype == query.dtype, "flash takes one dtype");
  call.dtype = element_of(query.dtype);
  require(call.dtype >= 0, "flash takes float32, bfloat16 or float16");
  call.query = heads_of(query), call.key = heads_of(key), call.value = heads_of(value);
  call.rules = given.rules(call.batch, call.heads, call.length, call.keys);
  call.left = given.left, call.right = given.right;
  require(static_cast<bool>(given.query_segment_ids) == static_cast<bool>(given.key_segment_ids),
          "flash: segments are given of queries and keys");
  if (given.query_segment_ids) {
    segments.emplace(*given.query_segment_ids, *given.key_segment_ids, call.batch, call.length, call.keys);
    segments->give(call);
  }
  require(static_cast<bool>(given.seed) == (given.dropout_prob > 0.0) && given.dropout_prob >= 0.0 && given.dropout_prob < 1.0,
          "flash: dropout takes a probability of 0 to 1, and then a seed");
  if (given.seed) {
    require(given.seed->numel() == 1 && given.seed->dtype == aoti_torch_dtype_int64(), "flash: a seed is one number of int64");
    call.kept = static_cast<float>(1.0 / (1.0 - given.dropout_prob));
    call.seed = static_cast<uint32_t>(*static_cast<const int64_t*>(given.seed->data));
    call.dropped = static_cast<uint32_t>(given.dropout_prob * 4294967296.0);
  }
  return call;
}

}  // namespace easytorch
