// The gradients of the scan of Mamba-2, chunk by chunk as products that stay in the caches: going forward the state before
// each chunk is kept; going backward a chunk's outputs depend on its tokens and on that state only.
//
// With u = step * x, a = exp(step * A), the decays L[i, j] = a[j+1] ... a[i] of pairs j <= i, those before[i] = a[0] ... a[i]
// and after[j] = a[j+1] ... a[last], scores = C B^T and M = scores * L, a chunk computes
//     y = M u + before * C S^T,    S' = whole * S + (after * u)^T B,    whole = before[last].
// The gradient of log a[k] adds up everything that a[k] is a factor of. (Section 6 of https://arxiv.org/abs/2405.21060.)
#include "cpu_scan_backward.h"

#include "../cpu/product.h"
#include "../cpu/transpose.h"
#include "cpu_chunk.h"

namespace {

inline void zero(float* to, int64_t count) { memset(to, 0, static_cast<size_t>(count) * sizeof *to); }

// The memory of a task: matrices of CHUNK tokens, with rows of whole vectors, and states (P, N), up to whole tiles of rows.
struct Memory {
  int64_t x_row, state_row, size, heads;  // size: of a state; heads: of the lane
  float *B, *C, *B_columns, *scores;      // what the heads share: (CHUNK, N) twice, (N, CHUNK), (CHUNK, CHUNK)
  float *of_B, *of_C, *of_scores;
  float *x, *given, *grad, *before_grad;  // (CHUNK, P): x, after * u, the gradient of y, and before * that
  float *x_columns, *of_columns, *of_x;   // (P, CHUNK) twice: x and the gradient of u; this one turned back
  float *of_own;                          // (CHUNK, N): the head's part of the gradient of C
  float *pairs, *weights;                 // (CHUNK, CHUNK): M; M times its gradient
  float *steps, *decays, *before, *after, *of_log, *of_step;  // (CHUNK)
  float *of_D;                            // (heads, P)
  double* of_A;                           // (heads)
  float *gradient, *kept;                 // of the states of each head; the states before each chunk
  int64_t numbers;

  Memory(const Ssm2GradientCall& g, float* start) {
    const Ssm2Call& c = g.call;
    x_row = whole_vectors(whole_rows(c.width)), state_row = whole_vectors(c.state);
    size = whole_rows(c.width) * state_row, heads = (c.heads / c.groups + g.lanes - 1) / (g.lanes > 0 ? g.lanes : 1);
    float* p = start;
    const auto take = [&p](int64_t count) {
      float* const taken = p;
      p += count;
      return taken;
    };
    of_A = reinterpret_cast<double*>(take(2 * heads));  // first: the memory is aligned for them
    B = take(CHUNK * state_row), C = take(CHUNK * state_row), B_columns = take(state_row * CHUNK);
    of_B = take(CHUNK * state_row), of_C = take(CHUNK * state_row), of_own = take(CHUNK * state_row);
    scores = take(CHUNK * CHUNK), of_scores = take(CHUNK * CHUNK);
    pairs = take(CHUNK * CHUNK), weights = take(CHUNK * CHUNK);
    x = take(CHUNK * x_row), given = take(CHUNK * x_row), grad = take(CHUNK * x_row), before_grad = take(CHUNK * x_row);
    x_columns = take(x_row * CHUNK), of_columns = take(x_row * CHUNK), of_x = take(CHUNK * x_row);
    steps = take(CHUNK), decays = take(CHUNK), before = take(CHUNK), after = take(CHUNK);
    of_log = take(CHUNK), of_step = take(CHUNK);
    of_D = take(heads * x_row), gradient = take(heads * size);
    kept = take(chunks_of(c) * heads * size);
    numbers = p - start;
  }
};

// One of a lane's heads; `number`: which of them.
struct Head {
  int64_t b, head, number;
};

inline void turn(const float* from, int64_t rows, int64_t columns, int64_t row, float* to, int64_t to_row) {
  for (int64_t i = 0; i < rows; i += WIDTH) {
    for (int64_t j = 0; j < columns; j += WIDTH) {
      transpose(reinterpret_cast<const char*>(from + i * row + j), row * 4, reinterpret_cast<char*>(to + j * to_row + i),
                to_row * 4);
    }
  }
}

// A state (P, N), or zeros where there is none.
inline void read_state(const Ssm2Call& c, const Head& h, const float* from, const Memory& m, float* to) {
  zero(to, m.size);
  if (from == nullptr) return;
  from += (h.b * c.heads + h.head) * c.width * c.state;
  for (int64_t p = 0; p < c.width; ++p) {
    memcpy(to + p * m.state_row, from + p * c.state, static_cast<size_t>(c.state) * sizeof *to);
  }
}

// x, after * u and the decays of a chunk -> those of the whole chunk.
inline float read_chunk(const Ssm2Call& c, const Head& h, int64_t first, int64_t count, const Memory& m) {
  time_steps(c, h.b, h.head, first, count, m.steps, m.decays);
  read_tokens(c.x, c.length, h.b, first, count, h.head, c.width, m.x, m.x_row);
  float product = 1.0f;
  for (int64_t i = 0; i < count; ++i) m.before[i] = product *= m.decays[i];
  const float whole = product;
  product = 1.0f;
  for (int64_t j = count - 1; j >= 0; --j) m.after[j] = product, product *= m.decays[j];
  for (int64_t j = 0; j < count; ++j) {
    const Floats factor = broadcast(m.steps[j] * m.after[j]);
    for (int64_t p = 0; p < m.x_row; p += WIDTH) {
      store(m.given + j * m.x_row + p, multiply(load(m.x + j * m.x_row + p), factor));
    }
  }
  return whole;
}

// The gradients of y, and of the gate; what they give to that of D.
inline void read_gradient(const Ssm2GradientCall& g, const Head& h, int64_t first, int64_t count, const Memory& m) {
  const Ssm2Call& c = g.call;
  read_tokens(g.grad, c.length, h.b, first, count, h.head, c.width, m.grad, m.x_row);
  float* const of_D = m.of_D + h.number * m.x_row;
  for (int64_t i = 0; i < count; ++i) {
    float *row = m.grad + i * m.x_row, *to = m.before_grad + i * m.x_row;
    const Floats factor = broadcast(m.before[i]), one = broadcast(1.0f);
    const int64_t place = ((h.b * c.length + first + i) * c.heads + h.head) * c.width;
    for (int64_t p = 0; p < c.width; p += WIDTH) {
      const int64_t left = c.width - p;
      Floats v = load(row + p);
      if (c.z.data != nullptr) {
        const Floats z = read_vector(number_at(row_of(c.z, h.b, first + i, h.head), p, c.z.dtype), left, c.z.dtype);
        const Floats plain =
            read_vector(number_at(row_of(g.plain, h.b, first + i, h.head), p, g.plain.dtype), left, g.plain.dtype);
        const Floats sigmoid = times_sigmoid(one, z);
        // silu'(z) = sigmoid * (1 + z * (1 - sigmoid))
        const Floats slope = multiply_add(multiply(z, broadcast(-1.0f)), sigmoid, add(one, z));
        write_vector(number_at(g.grad_z, place + p, c.z.dtype), left, c.z.dtype,
                     multiply(multiply(v, plain), multiply(sigmoid, slope)));
        v = multiply(v, multiply(z, sigmoid));
        store(row + p, v);
      }
      store(of_D + p, multiply_add(v, load(m.x + i * m.x_row + p), load(of_D + p)));
      store(to + p, multiply(v, factor));
    }
  }
}

// M, M times its gradient, and what the head gives to the gradient of the scores; weights: the gradient of M / steps[j].
inline void weigh_pairs(int64_t count, const Memory& m) {
  float between[CHUNK];
  zero(between, CHUNK), zero(m.pairs, CHUNK * CHUNK);
  for (int64_t i = 0; i < count; ++i) {
    float *pairs = m.pairs + i * CHUNK, *weights = m.weights + i * CHUNK, *of_scores = m.of_scores + i * CHUNK;
    const Floats decay = broadcast(m.decays[i]);
    for (int64_t j = 0; j < i; j += WIDTH) store(between + j, multiply(load(between + j), decay));
    between[i] = 1.0f;
    for (int64_t j = i + 1; j < whole_vectors(i + 1); ++j) weights[j] = 0.0f;  // tokens to come do not count, NaN neither
    for (int64_t j = 0; j <= i; j += WIDTH) {
      const Floats of_pair = multiply(load(weights + j), load(m.steps + j)), one = load(between + j);
      const Floats pair = multiply(load(m.scores + i * CHUNK + j), one);
      store(pairs + j, pair);
      store(of_scores + j, multiply_add(of_pair, one, load(of_scores + j)));
      store(weights + j, multiply(of_pair, pair));
    }
  }
}

// of_log[k] = the sum of weights[i, j] over the pairs j < k <= i.
inline void add_weights(int64_t count, const Memory& m) {
  float columns[CHUNK];  // over i >= k
  zero(columns, CHUNK);
  for (int64_t k = count - 1; k >= 0; --k) {
    Floats total = zeros();
    for (int64_t j = 0; j <= k; j += WIDTH) store(columns + j, add(load(columns + j), load(m.weights + k * CHUNK + j)));
    columns[k] = 0.0f;
    for (int64_t j = 0; j < k; j += WIDTH) total = add(total, load(columns + j));
    m.of_log[k] = sum(total);
  }
}

// The gradients that go through a chunk of a head: m.gradient, of the state after it, becomes that of the state before.
void go_back(const Ssm2GradientCall& g, const Head& h, int64_t chunk, const Memory& m) {
  const Ssm2Call& c = g.call;
  const int64_t first = chunk * CHUNK, count = tokens_of(c, chunk);
  const float* const state = m.kept + (chunk * m.heads + h.number) * m.size;
  float* const gradient = m.gradient + h.number * m.size;
  const float whole = read_chunk(c, h, first, count, m);
  turn(m.x, CHUNK, m.x_row, m.x_row, m.x_columns, CHUNK);
  read_gradient(g, h, first, count, m);
  multiply_matrices({m.grad, m.x_row, 1}, count, c.width, m.x_columns, CHUNK, count, 0.0f, m.weights, CHUNK, LOWER_RESULT);
  weigh_pairs(count, m);
  add_weights(count, m);

  // through the state before: `from_before` of the decays before the tokens, and that of the whole chunk
  multiply_matrices({m.before_grad, m.x_row, 1}, count, c.width, state, m.state_row, c.state, 0.0f, m.of_own, m.state_row);
  float after_all = 0.0f;
  for (int64_t i = count - 1; i >= 0; --i) {
    Floats total = zeros();
    for (int64_t n = 0; n < m.state_row; n += WIDTH) {
      const int64_t place = i * m.state_row + n;
      const Floats own = load(m.of_own + place);
      total = multiply_add(load(m.C + place), own, total);
      store(m.of_C + place, add(load(m.of_C + place), own));
    }
    m.of_log[i] += after_all += sum(total);
  }
  Floats both = zeros();
  for (int64_t i = 0; i < c.width * m.state_row; i += WIDTH) both = multiply_add(load(state + i), load(gradient + i), both);

  // the gradient of u: through the state after, where its part times u is that of the decays after the tokens
  multiply_matrices({gradient, m.state_row, 1}, c.width, c.state, m.B_columns, CHUNK, count, 0.0f, m.of_columns, CHUNK);
  float before_all = whole * sum(both);
  for (int64_t j = 0; j < count; j += WIDTH) {
    const Floats factor = load(m.after + j);
    Floats total = zeros();
    for (int64_t p = 0; p < c.width; ++p) {
      const Floats v = multiply(load(m.of_columns + p * CHUNK + j), factor);
      store(m.of_columns + p * CHUNK + j, v);
      total = multiply_add(load(m.x_columns + p * CHUNK + j), v, total);
    }
    store(m.of_step + j, multiply(total, load(m.steps + j)));
  }
  for (int64_t k = 0; k < count; ++k) m.of_log[k] += before_all, before_all += m.of_step[k];
  // and through the outputs of the chunk
  multiply_matrices({m.grad, 1, m.x_row}, c.width, count, m.pairs, CHUNK, count, 1.0f, m.of_columns, CHUNK);
  for (int64_t j = 0; j < count; j += WIDTH) {
    const Floats factor = load(m.steps + j);
    Floats total = zeros();
    for (int64_t p = 0; p < c.width; ++p) {
      const Floats v = load(m.of_columns + p * CHUNK + j);
      total = multiply_add(load(m.x_columns + p * CHUNK + j), v, total);
      store(m.of_columns + p * CHUNK + j, multiply(v, factor));
    }
    store(m.of_step + j, total);
  }
  turn(m.of_columns, m.x_row, CHUNK, CHUNK, m.of_x, m.x_row);

  multiply_matrices({m.given, m.x_row, 1}, count, c.width, gradient, m.state_row, c.state, 1.0f, m.of_B, m.state_row);
  multiply_matrices({m.before_grad, 1, m.x_row}, c.width, count, m.C, m.state_row, c.state, whole, gradient, m.state_row);

  double of_A = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t scalar = (h.b * c.length + first + i) * c.heads + h.head;
    g.grad_dt[scalar] = m.of_step[i] + c.A[h.head] * m.of_log[i];
    of_A += static_cast<double>(m.steps[i]) * m.of_log[i];
    for (int64_t p = 0; p < c.width; p += WIDTH) {
      const int64_t left = c.width - p;
      Floats v = load(m.of_x + i * m.x_row + p);
      if (c.D.data != nullptr) {
        const Floats D = c.D.of_token == 0
                             ? broadcast(load_number(c.D.data, h.head * c.D.of_head, c.D.dtype))
                             : read_vector(number_at(c.D.data, h.head * c.D.of_head + p, c.D.dtype), left, c.D.dtype);
        v = multiply_add(D, load(m.grad + i * m.x_row + p), v);
      }
      write_vector(number_at(g.grad_x, scalar * c.width + p, c.x.dtype), left, c.x.dtype, v);
    }
  }
  m.of_A[h.number] += of_A;
}

// The lane's parts of the gradients of B and of C, (T, N).
inline float* of_lane(const Ssm2GradientCall& g, int64_t b, int64_t group, int64_t lane) {
  return g.of_lanes + ((b * g.call.groups + group) * g.lanes + lane) * 2 * g.call.length * g.call.state;
}

void run(const Ssm2GradientCall* call, int64_t b, int64_t group, int64_t lane, float* scratch) {
  const Ssm2GradientCall& g = *call;
  const Ssm2Call& c = g.call;
  const Memory m(g, scratch);
  const int64_t shared = c.heads / c.groups, begin = lane * shared / g.lanes, heads = (lane + 1) * shared / g.lanes - begin;
  const int64_t chunks = chunks_of(c);
  const auto head = [&](int64_t number) { return Head{b, group * shared + begin + number, number}; };
  zero(m.of_D, m.heads * m.x_row), zero(m.of_step, CHUNK), zero(m.after, CHUNK);
  for (int64_t n = 0; n < heads; ++n) {
    read_state(c, head(n), c.initial, m, m.kept + n * m.size);
    read_state(c, head(n), g.final_grad, m, m.gradient + n * m.size);
    m.of_A[n] = 0.0;
  }
  for (int64_t chunk = 0; chunk + 1 < chunks; ++chunk) {
    read_tokens(c.B, c.length, b, chunk * CHUNK, CHUNK, group, c.state, m.B, m.state_row);
    for (int64_t n = 0; n < heads; ++n) {
      const float* const state = m.kept + (chunk * m.heads + n) * m.size;
      float* const next = m.kept + ((chunk + 1) * m.heads + n) * m.size;
      const float whole = read_chunk(c, head(n), chunk * CHUNK, CHUNK, m);
      memcpy(next, state, static_cast<size_t>(m.size) * sizeof *next);
      multiply_matrices({m.given, 1, m.x_row}, c.width, CHUNK, m.B, m.state_row, c.state, whole, next, m.state_row);
    }
  }
  float *const to_B = of_lane(g, b, group, lane), *const to_C = to_B + c.length * c.state;
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t first = chunk * CHUNK, count = tokens_of(c, chunk);
    read_tokens(c.B, c.length, b, first, count, group, c.state, m.B, m.state_row);
    read_tokens(c.C, c.length, b, first, count, group, c.state, m.C, m.state_row);
    turn(m.B, CHUNK, m.state_row, m.state_row, m.B_columns, CHUNK);
    multiply_matrices({m.C, m.state_row, 1}, count, c.state, m.B_columns, CHUNK, CHUNK, 0.0f, m.scores, CHUNK, LOWER_RESULT);
    for (int64_t i = 0; i < CHUNK; ++i) {
      for (int64_t j = i + 1; j < whole_vectors(i + 1); ++j) m.scores[i * CHUNK + j] = 0.0f;
    }
    zero(m.of_B, CHUNK * m.state_row), zero(m.of_C, CHUNK * m.state_row), zero(m.of_scores, CHUNK * CHUNK);
    for (int64_t n = 0; n < heads; ++n) go_back(g, head(n), chunk, m);
    multiply_matrices({m.of_scores, CHUNK, 1}, count, count, m.B, m.state_row, c.state, 1.0f, m.of_C, m.state_row, LOWER_LEFT);
    multiply_matrices({m.of_scores, 1, CHUNK}, count, count, m.C, m.state_row, c.state, 1.0f, m.of_B, m.state_row);
    for (int64_t i = 0; i < count; ++i) {
      memcpy(to_B + (first + i) * c.state, m.of_B + i * m.state_row, static_cast<size_t>(c.state) * sizeof *to_B);
      memcpy(to_C + (first + i) * c.state, m.of_C + i * m.state_row, static_cast<size_t>(c.state) * sizeof *to_C);
    }
  }
  for (int64_t n = 0; n < heads; ++n) {
    const int64_t place = b * c.heads + head(n).head;
    g.grad_A[place] = static_cast<float>(m.of_A[n]);
    memcpy(g.grad_D + place * c.width, m.of_D + n * m.x_row, static_cast<size_t>(c.width) * sizeof(float));
    float* const to = g.grad_initial + place * c.width * c.state;
    for (int64_t p = 0; p < c.width; ++p) {
      memcpy(to + p * c.state, m.gradient + n * m.size + p * m.state_row, static_cast<size_t>(c.state) * sizeof *to);
    }
  }
}

void add_lanes(const Ssm2GradientCall* call, int64_t b, int64_t group, int64_t chunk, float* scratch) {
  const Ssm2GradientCall& g = *call;
  const Ssm2Call& c = g.call;
  const int64_t first = chunk * CHUNK;
  for (int64_t i = first; i < first + tokens_of(c, chunk); ++i) {
    for (int64_t side = 0; side < 2; ++side) {
      zero(scratch, whole_vectors(c.state));
      for (int64_t lane = 0; lane < g.lanes; ++lane) {
        const float* const from = of_lane(g, b, group, lane) + (side * c.length + i) * c.state;
        for (int64_t n = 0; n < c.state; n += WIDTH) {
          store(scratch + n, add(load(scratch + n), read_some<NumbersFloat32>(from + n, c.state - n)));
        }
      }
      const int32_t dtype = side == 0 ? c.B.dtype : c.C.dtype;
      const int64_t place = ((b * c.length + i) * c.groups + group) * c.state;
      write_row(number_at(side == 0 ? g.grad_B : g.grad_C, place, dtype), c.state, dtype, scratch);
    }
  }
}

int64_t scratch(const Ssm2GradientCall* call) { return Memory(*call, nullptr).numbers; }
int64_t chunks(const Ssm2GradientCall* call) { return chunks_of(call->call); }

}  // namespace

extern const Ssm2Gradient EASYTORCH_NAME(ssm2_gradient);
const Ssm2Gradient EASYTORCH_NAME(ssm2_gradient) = {scratch, chunks, run, add_lanes};
