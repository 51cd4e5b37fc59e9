// The gradients of the gated delta rule, token by token: the columns of a state do not mix, so some of them stay in the
// L1 cache. One state in CHUNK is kept going forward; going backward those between are computed again.
#include "cpu_delta_backward.h"

#include "../cpu/functions.h"
#include "../cpu/rows.h"

namespace {

// Tokens between the states that are kept; vectors of columns of a state; rows whose sums are computed together.
constexpr int64_t CHUNK = 16, MOST = 4, ROWS = 4;

inline int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
inline void zero(float* to, int64_t count) { memset(to, 0, static_cast<size_t>(count) * sizeof *to); }

// The memory of a task, for columns of N vectors.
struct Memory {
  int64_t rows;  // of a state, up to whole vectors
  float *query, *key, *of_query, *of_key, *of_key_before;  // (CHUNK, rows) twice; (rows)
  float *decay, *beta;                                     // (CHUNK)
  float *change, *rest;                                    // (CHUNK, MOST * WIDTH): u and value - m of the tokens
  float *state, *gradient;                                 // (rows, columns)
  float *between, *kept;                                   // the states before the tokens of a chunk; before the chunks
  int64_t numbers;

  Memory(const DeltaCall& c, float* start) {
    rows = up_to(c.key_width, WIDTH);
    const int64_t chunks = (c.length + CHUNK - 1) / CHUNK, size = rows * MOST * WIDTH;
    float* p = start;
    const auto take = [&p](int64_t count) {
      float* const taken = p;
      p += count;
      return taken;
    };
    query = take(CHUNK * rows), key = take(CHUNK * rows);
    of_query = take(rows), of_key = take(rows), of_key_before = take(rows);
    decay = take(CHUNK), beta = take(CHUNK);
    change = take(CHUNK * MOST * WIDTH), rest = take(CHUNK * MOST * WIDTH);
    state = take(size), gradient = take(size);
    between = take(CHUNK * size), kept = take(chunks * size);
    numbers = p - start;
  }
};

// Columns [first, first + N * WIDTH) of the state of a value head.
struct Columns {
  int64_t b, head, value_head, first, count;  // count: those that there are
};

inline void read_columns(const void* row, const Columns& at, int32_t dtype, Floats* to, int n) {
  for (int v = 0; v < n; ++v) {
    const int64_t left = at.count - v * WIDTH;
    to[v] = left > 0 ? read_vector(number_at(row, at.first + v * WIDTH, dtype), left, dtype) : zeros();
  }
}

// Numbers of a state (Dk, Dv), or zeros where there is none, and back.
template <int N>
inline void read_state(const float* from, const DeltaCall& c, const Columns& at, int64_t rows, float* to) {
  zero(to, rows * N * WIDTH);
  if (from == nullptr) return;
  from += (at.b * c.value_heads + at.value_head) * c.key_width * c.value_width + at.first;
  for (int64_t d = 0; d < c.key_width; ++d) {
    memcpy(to + d * N * WIDTH, from + d * c.value_width, static_cast<size_t>(at.count) * sizeof *to);
  }
}

template <int N>
inline void read_chunk(const DeltaCall& c, const Columns& at, int64_t first, int64_t count, const Memory& m) {
  for (int64_t i = 0; i < count; ++i) {
    zero(m.query + i * m.rows, m.rows), zero(m.key + i * m.rows, m.rows);
    read_row(row_of(c.query, at.b, first + i, at.head), c.key_width, c.query.dtype, m.query + i * m.rows);
    read_row(row_of(c.key, at.b, first + i, at.head), c.key_width, c.key.dtype, m.key + i * m.rows);
    m.decay[i] = load_number(row_of(c.g, at.b, first + i, 0), at.value_head, c.g.dtype);
    m.beta[i] = load_number(row_of(c.beta, at.b, first + i, 0), at.value_head, c.beta.dtype);
  }
  for (int64_t i = count; i < CHUNK; ++i) m.decay[i] = 0.0f;
  for (int64_t i = 0; i < CHUNK; i += WIDTH) store(m.decay + i, exponential_of_any(load(m.decay + i)));
  for (int64_t i = 0; i < count; ++i) {
    if (c.documents.begins(at.b, first + i)) m.decay[i] = 0.0f;
  }
}

// The state after token i of a chunk, from that before it; `to` may be `from`, or null where only change and rest are
// wanted.
template <int N>
inline void advance(const DeltaCall& c, const Columns& at, int64_t token, int64_t i, const float* from, float* to,
                    const Memory& m) {
  const float *key = m.key + i * m.rows, decay = m.decay[i], beta = m.beta[i];
  Floats sums[N], change[N];
  for (int v = 0; v < N; ++v) sums[v] = zeros();
  for (int64_t d = 0; d < m.rows; ++d) {
    const Floats k = broadcast(key[d]);
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) sums[v] = multiply_add(k, load(from + (d * N + v) * WIDTH), sums[v]);
  }
  read_columns(row_of(c.value, at.b, token, at.value_head), at, c.value.dtype, change, N);
  for (int v = 0; v < N; ++v) {
    const Floats rest = multiply_add(sums[v], broadcast(-decay), change[v]);
    change[v] = multiply(rest, broadcast(beta));
    store(m.rest + (i * N + v) * WIDTH, rest);
    store(m.change + (i * N + v) * WIDTH, change[v]);
  }
  if (to == nullptr) return;
  const Floats factor = broadcast(decay);
  for (int64_t d = 0; d < m.rows; ++d) {
    const Floats k = broadcast(key[d]);
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      const Floats before = load(from + (d * N + v) * WIDTH);
      store(to + (d * N + v) * WIDTH, multiply_add(k, change[v], multiply(before, factor)));
    }
  }
}

// The gradients that go through token i of a chunk: m.gradient, of the state after it, becomes that of the state before.
template <int N>
inline void go_back(const DeltaGradientCall& g, const Columns& at, int64_t token, int64_t i, const float* before,
                    const Memory& m) {
  const DeltaCall& c = g.call;
  const float *query = m.query + i * m.rows, *key = m.key + i * m.rows, decay = m.decay[i], beta = m.beta[i];
  Floats out[N], change[N], of_change[N];
  read_columns(row_of(g.grad, at.b, token, at.value_head), at, g.grad.dtype, out, N);
  Floats both = zeros();
  for (int v = 0; v < N; ++v) {
    out[v] = multiply(out[v], broadcast(c.scale));
    change[v] = load(m.change + (i * N + v) * WIDTH), of_change[v] = zeros();
    both = multiply_add(change[v], out[v], both);
  }
  const float change_out = sum(both);
  for (int64_t d = 0; d < m.rows; d += ROWS) {
    Floats of_query[ROWS], of_key[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const Floats q = broadcast(query[d + r]), k = broadcast(key[d + r]);
      of_query[r] = of_key[r] = zeros();
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        const int64_t place = ((d + r) * N + v) * WIDTH;
        const Floats gradient = multiply_add(q, out[v], load(m.gradient + place));
        store(m.gradient + place, gradient);
        of_query[r] = multiply_add(load(before + place), out[v], of_query[r]);
        of_key[r] = multiply_add(gradient, change[v], of_key[r]);
        of_change[v] = multiply_add(k, gradient, of_change[v]);
      }
    }
    sum4(of_query[0], of_query[1], of_query[2], of_query[3], m.of_query + d);
    sum4(of_key[0], of_key[1], of_key[2], of_key[3], m.of_key + d);
  }
  // change = beta * rest, rest = value - decay * key^T state
  Floats of_beta = zeros(), of_decay = zeros(), of_rest[N];
  float* const to_value = g.grad_value + ((at.b * c.length + token) * c.value_heads + at.value_head) * c.value_width;
  for (int v = 0; v < N; ++v) {
    of_beta = multiply_add(of_change[v], load(m.rest + (i * N + v) * WIDTH), of_beta);
    of_rest[v] = multiply(of_change[v], broadcast(beta));
    const int64_t left = at.count - v * WIDTH;
    if (left > 0) write_some<NumbersFloat32>(to_value + at.first + v * WIDTH, left, of_rest[v]);
    of_rest[v] = multiply(of_rest[v], broadcast(-1.0f));
  }
  const Floats factor = broadcast(decay);
  for (int64_t d = 0; d < m.rows; d += ROWS) {
    Floats of_key[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const Floats k = broadcast(key[d + r]);
      of_key[r] = zeros();
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        const int64_t place = ((d + r) * N + v) * WIDTH;
        const Floats state = load(before + place), gradient = multiply_add(k, of_rest[v], load(m.gradient + place));
        of_decay = multiply_add(state, gradient, of_decay);
        of_key[r] = multiply_add(state, of_rest[v], of_key[r]);
        store(m.gradient + place, multiply(gradient, factor));
      }
    }
    sum4(of_key[0], of_key[1], of_key[2], of_key[3], m.of_key_before + d);
  }
  const int64_t row = ((at.b * c.length + token) * c.heads + at.head) * c.key_width;
  for (int64_t d = 0; d < c.key_width; ++d) {
    g.grad_query[row + d] += decay * m.of_query[d] + key[d] * change_out;
    g.grad_key[row + d] += m.of_key[d] + decay * m.of_key_before[d];
  }
  const int64_t scalar = (at.b * c.length + token) * c.value_heads + at.value_head;
  g.grad_beta[scalar] += sum(of_beta);
  g.grad_g[scalar] += decay * sum(of_decay);
}

template <int N>
void run_columns(const DeltaGradientCall& g, const Columns& at, const Memory& m) {
  const DeltaCall& c = g.call;
  const int64_t size = m.rows * N * WIDTH, chunks = (c.length + CHUNK - 1) / CHUNK;
  const size_t bytes = static_cast<size_t>(size) * sizeof(float);
  read_state<N>(c.initial, c, at, m.rows, m.state);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    memcpy(m.kept + chunk * size, m.state, bytes);
    const int64_t first = chunk * CHUNK;
    if (chunk + 1 == chunks) break;
    read_chunk<N>(c, at, first, CHUNK, m);
    for (int64_t i = 0; i < CHUNK; ++i) {
      if (c.documents.begins(at.b, first + i)) zero(m.state, size);
      advance<N>(c, at, first + i, i, m.state, m.state, m);
    }
  }
  read_state<N>(g.final_grad, c, at, m.rows, m.gradient);
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t first = chunk * CHUNK, count = c.length - first < CHUNK ? c.length - first : CHUNK;
    read_chunk<N>(c, at, first, count, m);
    memcpy(m.between, m.kept + chunk * size, bytes);
    for (int64_t i = 0; i < count; ++i) {
      float* const before = m.between + i * size;
      if (c.documents.begins(at.b, first + i)) zero(before, size);
      advance<N>(c, at, first + i, i, before, i + 1 < count ? before + size : nullptr, m);
    }
    for (int64_t i = count - 1; i >= 0; --i) {
      go_back<N>(g, at, first + i, i, m.between + i * size, m);
      if (c.documents.begins(at.b, first + i)) zero(m.gradient, size);
    }
  }
  float* const to = g.grad_initial + (at.b * c.value_heads + at.value_head) * c.key_width * c.value_width + at.first;
  for (int64_t d = 0; d < c.key_width; ++d) {
    memcpy(to + d * c.value_width, m.gradient + d * N * WIDTH, static_cast<size_t>(at.count) * sizeof *to);
  }
}

void run(const DeltaGradientCall* call, int64_t b, int64_t head, float* scratch) {
  const DeltaGradientCall& g = *call;
  const DeltaCall& c = g.call;
  const Memory m(c, scratch);
  const int64_t shared = c.value_heads / c.heads;
  for (int64_t t = 0; t < c.length; ++t) {
    const int64_t row = ((b * c.length + t) * c.heads + head) * c.key_width;
    const int64_t scalar = (b * c.length + t) * c.value_heads + head * shared;
    zero(g.grad_query + row, c.key_width), zero(g.grad_key + row, c.key_width);
    zero(g.grad_beta + scalar, shared), zero(g.grad_g + scalar, shared);
  }
  for (int64_t value_head = head * shared; value_head < (head + 1) * shared; ++value_head) {
    for (int64_t first = 0; first < c.value_width;) {
      const int64_t left = c.value_width - first, width = left > WIDTH ? MOST * WIDTH : WIDTH;
      const Columns at{b, head, value_head, first, left < width ? left : width};
      (width == WIDTH ? run_columns<1> : run_columns<MOST>)(g, at, m);
      first += width;
    }
  }
}

int64_t scratch(const DeltaGradientCall* call) { return Memory(call->call, nullptr).numbers; }

}  // namespace

extern const DeltaGradient EASYTORCH_NAME(delta_gradient);
const DeltaGradient EASYTORCH_NAME(delta_gradient) = {scratch, run};
