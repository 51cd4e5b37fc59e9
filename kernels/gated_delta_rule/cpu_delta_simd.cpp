// The gated delta rule, in chunks: https://arxiv.org/abs/2412.06464, section 3.3.
//
// Within a chunk the changes u_i = beta_i (v_i - state_i^T k_i) depend on those before them by a unit triangular system,
// whose right hand side depends on the state at the start of the chunk.
#include "cpu_delta.h"

#include <math.h>

#include "../cpu/functions.h"
#include "../cpu/product.h"
#include "../cpu/rows.h"

namespace {

// Tokens of a chunk: a multiple of the tile sizes of every instruction set.
constexpr int64_t CHUNK = 48;
constexpr int64_t PAIRS = CHUNK * CHUNK;
// How many tokens ahead the inputs are prefetched.
constexpr int64_t AHEAD = 8;

// Rows of keys, padded to whole vectors and to whole tiles of rows, since keys are read as columns too.
struct Layout {
  int64_t key_row, key_rows, value_row, state;
  explicit Layout(const DeltaCall& c)
      : key_row(rounded_up(c.key_width, WIDTH * PRODUCT_ROWS)), key_rows(whole_rows(c.key_width)),
        value_row(whole_vectors(c.value_width)), state(key_rows * value_row) {}
};

int64_t scratch_of(const DeltaCall* call) {
  const Layout l(*call);
  // keys, queries, decayed queries, keys as columns; changes, outputs; four matrices of pairs; decays; the states
  return CHUNK * (3 * l.key_row + 2 * l.value_row) + l.key_rows * CHUNK + 4 * PAIRS + 4 * CHUNK +
         call->value_heads / call->heads * l.state;
}

// A token's query or key: normalized where the call asks for it, times `factor`.
inline void read_key(const DeltaCall& c, const Strided& t, int64_t b, int64_t token, int64_t head, float factor, float* to) {
  read_row(row_of(t, b, token, head), c.key_width, t.dtype, to);
  if (c.normalized) {
    Floats total = zeros();
    for (int64_t d = 0; d < c.key_width; d += WIDTH) total = multiply_add(load(to + d), load(to + d), total);
    factor /= sqrtf(sum(total) + c.epsilon);
  }
  const Floats factors = broadcast(factor);
  for (int64_t d = 0; d < c.key_width; d += WIDTH) store(to + d, multiply(load(to + d), factors));
}

// The decays exp(g) of a value head's tokens, 0 where a segment begins, and their rates. CHUNK numbers each.
inline void gates(const DeltaCall& c, int64_t b, int64_t head, int64_t first, int64_t count, float* decays, float* rates) {
  for (int64_t i = 0; i < whole_vectors(count); ++i) {
    decays[i] = i < count ? load_number(row_of(c.g, b, first + i, 0), head, c.g.dtype) : 0.0f;
    if (i < count) rates[i] = load_number(row_of(c.beta, b, first + i, 0), head, c.beta.dtype);
  }
  for (int64_t i = 0; i < count; i += WIDTH) store(decays + i, exponential_of_any(load(decays + i)));
  for (int64_t i = 0; i < count; ++i) {
    if (c.documents.begins(b, first + i)) decays[i] = 0.0f;
  }
}

inline void scale_row(const float* from, float factor, float* to, int64_t count) {
  const Floats factors = broadcast(factor);
  for (int64_t d = 0; d < count; d += WIDTH) store(to + d, multiply(load(from + d), factors));
}

// The matrices of a chunk of one value head. With between_ij the product of the decays of tokens j+1..i:
// system = -rate_i between_ij k_i . k_j below the diagonal, scores = between_ij q_i . k_j up to it.
struct Chunk {
  int64_t count;
  const float *keys, *key_pairs, *query_pairs;
  const float *decays, *rates;
  float *system, *scores, *before, *between;  // before_i: the product of the decays up to token i; between: of the last row
};

inline void decay_pairs(const Chunk& k) {
  memset(k.between, 0, CHUNK * sizeof(float));
  memset(k.system, 0, PAIRS * sizeof(float));
  memset(k.scores, 0, PAIRS * sizeof(float));
  float before = 1.0f;
  for (int64_t i = 0; i < k.count; ++i) {
    const Floats decay = broadcast(k.decays[i]), rate = broadcast(-k.rates[i]);
    before *= k.decays[i];
    k.before[i] = before;
    for (int64_t j = 0; j < i; j += WIDTH) {
      const Floats kept = multiply(load(k.between + j), decay);
      store(k.between + j, kept);
      store(k.system + i * CHUNK + j, multiply(multiply(kept, load(k.key_pairs + i * CHUNK + j)), rate));
    }
    for (int64_t j = i; j < CHUNK && j < i + WIDTH; ++j) k.system[i * CHUNK + j] = 0.0f;
    k.between[i] = 1.0f;
    for (int64_t j = 0; j <= i; j += WIDTH) {
      store(k.scores + i * CHUNK + j, multiply(load(k.between + j), load(k.query_pairs + i * CHUNK + j)));
    }
    for (int64_t j = i + 1; j < CHUNK && j < i + 1 + WIDTH; ++j) k.scores[i * CHUNK + j] = 0.0f;
  }
}

// changes = (1 - system)^-1 changes: tiles of rows by the changes above them, then row by row.
inline void solve(const Chunk& k, float* changes, int64_t row, int64_t width) {
  for (int64_t i = 0; i < k.count; i += PRODUCT_ROWS) {
    const LeftMatrix above{k.system + i * CHUNK, CHUNK, 1};
    if (i > 0) multiply_matrices(above, PRODUCT_ROWS, i, changes, row, width, 1.0f, changes + i * row, row);
    for (int64_t r = i + 1; r < i + PRODUCT_ROWS && r < k.count; ++r) {
      for (int64_t d = 0; d < width; d += WIDTH) {
        Floats v = load(changes + r * row + d);
        for (int64_t j = i; j < r; ++j) {
          v = multiply_add(broadcast(k.system[r * CHUNK + j]), load(changes + j * row + d), v);
        }
        store(changes + r * row + d, v);
      }
    }
  }
}

void chunks(const DeltaCall* call, int64_t b, int64_t head, float* scratch) {
  const DeltaCall& c = *call;
  const Layout l(c);
  const int64_t shared = c.value_heads / c.heads, numbers = c.key_width * c.value_width;
  float *keys = scratch, *queries = keys + CHUNK * l.key_row, *decayed = queries + CHUNK * l.key_row;
  float *changes = decayed + CHUNK * l.key_row, *y = changes + CHUNK * l.value_row, *columns = y + CHUNK * l.value_row;
  float *key_pairs = columns + l.key_rows * CHUNK, *query_pairs = key_pairs + PAIRS, *system = query_pairs + PAIRS;
  float *scores = system + PAIRS, *decays = scores + PAIRS, *rates = decays + CHUNK, *before = rates + CHUNK;
  float *between = before + CHUNK, *states = between + CHUNK;
  memset(states, 0, static_cast<size_t>(shared * l.state) * sizeof *states);
  const int64_t at = (b * c.value_heads + head * shared) * numbers;
  for (int64_t row = 0; c.initial != nullptr && row < shared * c.key_width; ++row) {
    float* to = states + row / c.key_width * l.state + row % c.key_width * l.value_row;
    memcpy(to, c.initial + at + row * c.value_width, static_cast<size_t>(c.value_width) * sizeof *to);
  }
  for (int64_t first = 0; first < c.length; first += CHUNK) {
    const int64_t count = c.length - first < CHUNK ? c.length - first : CHUNK;
    memset(keys, 0, static_cast<size_t>(3 * CHUNK * l.key_row) * sizeof *keys);
    memset(columns, 0, static_cast<size_t>(l.key_rows * CHUNK) * sizeof *columns);
    for (int64_t i = 0; i < count; ++i) {
      if (first + i + AHEAD < c.length) {
        prefetch_row(row_of(c.query, b, first + i + AHEAD, head), c.key_width, c.query.dtype);
        prefetch_row(row_of(c.key, b, first + i + AHEAD, head), c.key_width, c.key.dtype);
      }
      read_key(c, c.query, b, first + i, head, c.scale, queries + i * l.key_row);
      read_key(c, c.key, b, first + i, head, 1.0f, keys + i * l.key_row);
      for (int64_t d = 0; d < c.key_width; ++d) columns[d * CHUNK + i] = keys[i * l.key_row + d];
    }
    multiply_matrices({keys, l.key_row, 1}, count, c.key_width, columns, CHUNK, count, 0.0f, key_pairs, CHUNK,
                      LOWER_RESULT);
    multiply_matrices({queries, l.key_row, 1}, count, c.key_width, columns, CHUNK, count, 0.0f, query_pairs, CHUNK,
                      LOWER_RESULT);
    for (int64_t s = 0; s < shared; ++s) {
      const int64_t value_head = head * shared + s;
      float* state = states + s * l.state;
      gates(c, b, value_head, first, count, decays, rates);
      const Chunk k{count, keys, key_pairs, query_pairs, decays, rates, system, scores, before, between};
      decay_pairs(k);
      multiply_matrices({keys, l.key_row, 1}, count, c.key_width, state, l.value_row, c.value_width, 0.0f, changes,
                        l.value_row);
      for (int64_t i = 0; i < count; ++i) {
        const void* value = row_of(c.value, b, first + i, value_head);
        if (first + i + AHEAD < c.length) {
          prefetch_row(row_of(c.value, b, first + i + AHEAD, value_head), c.value_width, c.value.dtype);
        }
        const Floats kept = broadcast(-before[i]), rate = broadcast(rates[i]);
        for (int64_t d = 0; d < c.value_width; d += WIDTH) {
          const Floats v = read_vector(number_at(value, d, c.value.dtype), c.value_width - d, c.value.dtype);
          float* change = changes + i * l.value_row + d;
          store(change, multiply(rate, multiply_add(load(change), kept, v)));
        }
        scale_row(queries + i * l.key_row, before[i], decayed + i * l.key_row, l.key_row);
      }
      solve(k, changes, l.value_row, c.value_width);
      multiply_matrices({scores, CHUNK, 1}, count, count, changes, l.value_row, c.value_width, 0.0f, y, l.value_row,
                        LOWER_LEFT);
      multiply_matrices({decayed, l.key_row, 1}, count, c.key_width, state, l.value_row, c.value_width, 1.0f, y,
                        l.value_row);
      for (int64_t i = 0; i < count; ++i) {
        scale_row(changes + i * l.value_row, between[i], changes + i * l.value_row, l.value_row);
        void* to = number_at(c.output, ((b * c.length + first + i) * c.value_heads + value_head) * c.value_width,
                             c.value.dtype);
        write_row(to, c.value_width, c.value.dtype, y + i * l.value_row);
      }
      multiply_matrices({keys, 1, l.key_row}, c.key_width, count, changes, l.value_row, c.value_width, before[count - 1],
                        state, l.value_row);
    }
  }
  for (int64_t row = 0; row < shared * c.key_width; ++row) {
    const float* from = states + row / c.key_width * l.state + row % c.key_width * l.value_row;
    memcpy(c.final + at + row * c.value_width, from, static_cast<size_t>(c.value_width) * sizeof *from);
  }
}

// One token's inputs for a value head.
struct Token {
  const float *key, *query, *value;
  float decay, rate;
  int64_t key_width, width;
};

// The columns [d, d + N vectors) of the state, of which `left` are there, and the token's output of them.
template <int N>
inline void step_columns(const Token& t, const float* from, float* to, int64_t d, int64_t left, float* y) {
  const Floats decay = broadcast(t.decay), rate = broadcast(t.rate);
  Floats totals[N], changes[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) totals[n] = zeros();
  for (int64_t k = 0; from != nullptr && k < t.key_width; ++k) {
    const Floats key = broadcast(t.key[k]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      totals[n] = multiply_add(key, read_some<NumbersFloat32>(from + k * t.width + d + n * WIDTH, left - n * WIDTH), totals[n]);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const Floats kept = multiply(totals[n], multiply(decay, broadcast(-1.0f)));
    changes[n] = multiply(rate, add(load(t.value + d + n * WIDTH), kept));
    totals[n] = zeros();
  }
  for (int64_t k = 0; k < t.key_width; ++k) {
    const Floats key = broadcast(t.key[k]), query = broadcast(t.query[k]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const int64_t at = k * t.width + d + n * WIDTH, some = left - n * WIDTH;
      const Floats old = from == nullptr ? zeros() : read_some<NumbersFloat32>(from + at, some);
      const Floats now = multiply_add(key, changes[n], multiply(old, decay));
      write_some<NumbersFloat32>(to + at, some, now);
      totals[n] = multiply_add(query, now, totals[n]);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) store(y + d + n * WIDTH, totals[n]);
}

void step(const DeltaCall* call, int64_t b, int64_t value_head, float* scratch) {
  const DeltaCall& c = *call;
  const Layout l(c);
  const int64_t head = value_head / (c.value_heads / c.heads), width = c.value_width;
  const int64_t at = (b * c.value_heads + value_head) * c.key_width * width;
  float *key = scratch, *query = key + l.key_row, *value = query + l.key_row, *y = value + l.value_row;
  float *decays = y + l.value_row, *rates = decays + CHUNK;
  const float* from = c.initial == nullptr ? nullptr : c.initial + at;
  float* to = c.final + at;
  for (int64_t t = 0; t < c.length; ++t, from = to) {
    read_key(c, c.query, b, t, head, c.scale, query);
    read_key(c, c.key, b, t, head, 1.0f, key);
    gates(c, b, value_head, t, 1, decays, rates);
    read_row(row_of(c.value, b, t, value_head), width, c.value.dtype, value);
    const Token token{key, query, value, decays[0], rates[0], c.key_width, width};
    for (int64_t d = 0; d < width;) {
      const bool several = d + 4 * WIDTH <= width;
      (several ? step_columns<4> : step_columns<1>)(token, from, to, d, width - d, y);
      d += several ? 4 * WIDTH : WIDTH;
    }
    write_row(number_at(c.output, ((b * c.length + t) * c.value_heads + value_head) * width, c.value.dtype), width,
              c.value.dtype, y);
  }
}

}  // namespace

extern const DeltaFunctions EASYTORCH_NAME(delta);
const DeltaFunctions EASYTORCH_NAME(delta) = {scratch_of, chunks, step};
