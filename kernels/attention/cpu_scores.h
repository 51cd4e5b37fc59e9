// What becomes of the products of queries and keys: scale, softcap, bias and mask of contract.py, and the sinks.
#pragma once

#include <math.h>

#include "../cpu/functions.h"
#include "../cpu/rows.h"

// (B, H, T, S), broadcast by strides of 0; strides in numbers. data null: there is none.
struct ScoreMatrix {
  const void* data;
  int64_t of_batch, of_head, of_row, of_column;
};

struct ScoreRules {
  float scale, softcap;  // softcap 0: none
  ScoreMatrix mask;      // a byte for each score: 0 hides it
  ScoreMatrix bias;
  int32_t bias_dtype;
  const void* sinks;  // H numbers, or null
  int32_t sinks_dtype;
};

namespace {

constexpr float HIDDEN = -INFINITY;

// Whether the scale is all that changes the order of the scores, and it does not: it may be applied at any time.
inline bool only_scaled(const ScoreRules& rules) {
  return !(rules.softcap > 0.0f) && rules.bias.data == nullptr && rules.scale > 0.0f;
}

inline int64_t place_of(const ScoreMatrix& matrix, int64_t b, int64_t h, int64_t i, int64_t j) {
  return b * matrix.of_batch + h * matrix.of_head + i * matrix.of_row + j * matrix.of_column;
}

// The bias of query i of (b, h) and of the keys [from, from + count) is added to their scores, up to a whole vector.
inline void add_bias(const ScoreRules& rules, int64_t b, int64_t h, int64_t i, int64_t from, int64_t count, float* scores) {
  const int64_t first = place_of(rules.bias, b, h, i, from), step = rules.bias.of_column;
  if (step > 1) {
    for (int64_t j = 0; j < count; ++j) scores[j] += load_number(rules.bias.data, first + j * step, rules.bias_dtype);
    return;
  }
  const Floats all = broadcast(step == 0 && count > 0 ? load_number(rules.bias.data, first, rules.bias_dtype) : 0.0f);
  for (int64_t j = 0; j < count; j += WIDTH) {
    const void* const p = number_at(rules.bias.data, first + j, rules.bias_dtype);
    store(scores + j, add(load(scores + j), step == 0 ? all : read_vector(p, count - j, rules.bias_dtype)));
  }
}

// Products of query i of (b, h) with the keys [from, from + count) become scores, before the mask; `padded` of them, a
// multiple of WIDTH, may be written.
inline void apply_rules(const ScoreRules& rules, int64_t b, int64_t h, int64_t i, int64_t from, int64_t count,
                        int64_t padded, float* scores) {
  const Floats scale = broadcast(rules.scale), cap = broadcast(rules.softcap);
  for (int64_t j = 0; j < padded; j += WIDTH) {
    Floats s = multiply(load(scores + j), scale);
    if (rules.softcap > 0.0f) s = multiply(hyperbolic_tangent(divide(s, cap)), cap);
    store(scores + j, s);
  }
  if (rules.bias.data != nullptr) add_bias(rules, b, h, i, from, count, scores);
}

// HIDDEN in place of the scores that the mask hides.
inline void hide(const ScoreRules& rules, int64_t b, int64_t h, int64_t i, int64_t from, int64_t count, float* scores) {
  if (rules.mask.data == nullptr) return;
  const uint8_t* mask = static_cast<const uint8_t*>(rules.mask.data) + place_of(rules.mask, b, h, i, from);
  for (int64_t j = 0; j < count; ++j) scores[j] = mask[j * rules.mask.of_column] != 0 ? scores[j] : HIDDEN;
}

// The sink of head h: one more logit, HIDDEN without sinks.
inline float sink_of(const ScoreRules& rules, int64_t h) {
  return rules.sinks == nullptr ? HIDDEN : load_number(rules.sinks, h, rules.sinks_dtype);
}

}  // namespace
