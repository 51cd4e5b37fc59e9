// Chunks of the scan of Mamba-2: their tokens and time steps, read as float32.
#pragma once

#include "../cpu/functions.h"
#include "../cpu/rows.h"
#include "cpu_scan.h"

namespace {

// Tokens of a chunk: a multiple of the tile sizes of every instruction set.
constexpr int64_t CHUNK = 48;
// How many tokens ahead the inputs are prefetched.
constexpr int64_t AHEAD = 8;

inline int64_t chunks_of(const Ssm2Call& c) { return (c.length + CHUNK - 1) / CHUNK; }
inline int64_t tokens_of(const Ssm2Call& c, int64_t chunk) {
  const int64_t left = c.length - chunk * CHUNK;
  return left < CHUNK ? left : CHUNK;
}

// Rows of tokens as float32, padded with zeros to a full chunk.
inline void read_tokens(const Strided& t, int64_t length, int64_t b, int64_t first, int64_t count, int64_t head,
                        int64_t numbers, float* to, int64_t row) {
  memset(to, 0, static_cast<size_t>(CHUNK * row) * sizeof *to);
  for (int64_t i = 0; i < count; ++i) {
    if (first + i + AHEAD < length) prefetch_row(row_of(t, b, first + i + AHEAD, head), numbers, t.dtype);
    read_row(row_of(t, b, first + i, head), numbers, t.dtype, to + i * row);
  }
}

// The time steps of a head's tokens and their decays exp(step * A), 0 where a segment begins. CHUNK numbers each.
inline void time_steps(const Ssm2Call& c, int64_t b, int64_t head, int64_t first, int64_t count, float* steps, float* decays) {
  const float bias = c.dt_bias.data == nullptr ? 0.0f : load_number(c.dt_bias.data, head, c.dt_bias.dtype);
  for (int64_t i = 0; i < count; ++i) {
    steps[i] = load_number(row_of(c.dt, b, first + i, 0), head, c.dt.dtype) + bias;
  }
  for (int64_t i = count; i < whole_vectors(count); ++i) steps[i] = 0.0f;
  for (int64_t i = 0; i < count; i += WIDTH) {
    Floats v = load(steps + i);
    if (c.softplus) v = softplus(v);
    v = minimum(broadcast(c.greatest), maximum(broadcast(c.least), v));
    store(steps + i, v);
    store(decays + i, exponential_of_any(multiply(v, broadcast(c.A[head]))));
  }
  for (int64_t i = 0; i < count; ++i) {
    if (c.documents.begins(b, first + i)) decays[i] = 0.0f;
  }
}

}  // namespace
