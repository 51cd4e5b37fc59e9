// The tensors of a gated delta rule, checked.
#pragma once

#include "../cpu/sequences.h"
#include "cpu_delta.h"

namespace easytorch {

// query, key (B, T, H, Dk), value (B, T, Hv, Dv), g and beta (B, T, Hv), initial (B, Hv, Dk, Dv) float32, documents (B, T)
// int64; an absent one is (0,). Without scale, normalization and results.
inline DeltaCall delta_call(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& g,
                            const Tensor& beta, const Tensor& initial, const Tensor& documents) {
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
  call.documents = documents_of(documents, call.batch, call.length, "gated_delta_rule: documents are (B, T) of int64");
  const int64_t states[4] = {call.batch, call.value_heads, call.key_width, call.value_width};
  call.initial = state_of(initial, 4, states, "gated_delta_rule: the state is (B, Hv, Dk, Dv) of float32");
  return call;
}

}  // namespace easytorch
