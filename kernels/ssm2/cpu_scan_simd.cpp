// The scan of Mamba-2, in chunks whose outputs and states are products: section 6 of https://arxiv.org/abs/2405.21060.
#include "../cpu/product.h"
#include "cpu_chunk.h"

namespace {

// The sizes of a head's matrices: of x, B and C padded to whole vectors, and to whole tiles of rows where they have them.
struct Layout {
  int64_t x_row, state_row, state_rows;
  explicit Layout(const Ssm2Call& c)
      : x_row(whole_vectors(c.width)), state_row(rounded_up(c.state, WIDTH * PRODUCT_ROWS)), state_rows(whole_rows(c.state)) {}
};

Ssm2Sizes sizes(const Ssm2Call* call) {
  const Layout l(*call);
  // x, x of the state, y; C times its decays, and B; the decays of pairs; the state
  const int64_t scratch = CHUNK * (3 * l.x_row + 2 * l.state_row + CHUNK) + l.state_rows * l.x_row;
  return {CHUNK, CHUNK * CHUNK, scratch + 4 * CHUNK};
}

inline float* scores_of(const Ssm2Call& c, int64_t b, int64_t group, int64_t chunk) {
  return c.scores + ((b * c.groups + group) * chunks_of(c) + chunk) * CHUNK * CHUNK;
}

void score(const Ssm2Call* call, int64_t b, int64_t group, int64_t chunk, float* scratch) {
  const Ssm2Call& c = *call;
  const Layout l(c);
  const int64_t first = chunk * CHUNK, count = tokens_of(c, chunk);
  float *rows = scratch, *columns = rows + CHUNK * l.state_row, *row = columns + c.state * CHUNK;
  read_tokens(c.C, c.length, b, first, count, group, c.state, rows, l.state_row);
  memset(columns, 0, static_cast<size_t>(c.state * CHUNK) * sizeof *columns);
  for (int64_t j = 0; j < count; ++j) {
    read_row(row_of(c.B, b, first + j, group), c.state, c.B.dtype, row);
    for (int64_t n = 0; n < c.state; ++n) columns[n * CHUNK + j] = row[n];
  }
  float* y = scores_of(c, b, group, chunk);
  multiply_matrices({rows, l.state_row, 1}, count, c.state, columns, CHUNK, CHUNK, 0.0f, y, CHUNK, LOWER_RESULT);
  for (int64_t i = 0; i < CHUNK; ++i) {  // tokens to come do not count, NaN neither
    for (int64_t j = i + 1; j < CHUNK; ++j) y[i * CHUNK + j] = 0.0f;
  }
}

// (y + D * x) * silu(z) to the output, and what is before the gate to `plain`; y has `width` numbers.
inline void finish(const Ssm2Call& c, int64_t b, int64_t token, int64_t head, const float* y) {
  const int64_t place = ((b * c.length + token) * c.heads + head) * c.width;
  void* to = number_at(c.output, place, c.x.dtype);
  const void* x = row_of(c.x, b, token, head);
  for (int64_t p = 0; p < c.width; p += WIDTH) {
    const int64_t left = c.width - p;
    Floats v = load(y + p);
    if (c.D.data != nullptr) {
      const Floats D = c.D.of_token == 0
                           ? broadcast(load_number(c.D.data, head * c.D.of_head, c.D.dtype))
                           : read_vector(number_at(c.D.data, head * c.D.of_head + p, c.D.dtype), left, c.D.dtype);
      v = add(v, multiply(D, read_vector(number_at(x, p, c.x.dtype), left, c.x.dtype)));
    }
    if (c.plain != nullptr) write_some<NumbersFloat32>(c.plain + place + p, left, v);
    if (c.z.data != nullptr) {
      v = multiply(v, silu(read_vector(number_at(row_of(c.z, b, token, head), p, c.z.dtype), left, c.z.dtype)));
    }
    write_vector(number_at(to, p, c.x.dtype), left, c.x.dtype, v);
  }
}

void scan(const Ssm2Call* call, int64_t b, int64_t head, float* scratch) {
  const Ssm2Call& c = *call;
  const Layout l(c);
  const int64_t group = head / (c.heads / c.groups), chunks = chunks_of(c);
  float *x = scratch, *given = x + CHUNK * l.x_row, *y = given + CHUNK * l.x_row, *C = y + CHUNK * l.x_row;
  float *B = C + CHUNK * l.state_row, *pairs = B + CHUNK * l.state_row, *state = pairs + CHUNK * CHUNK;
  float *steps = state + l.state_rows * l.x_row, *decays = steps + CHUNK, *between = decays + CHUNK;
  const int64_t numbers = c.width * c.state, at = (b * c.heads + head) * numbers;
  memset(state, 0, static_cast<size_t>(l.state_rows * l.x_row) * sizeof *state);
  for (int64_t p = 0; c.initial != nullptr && p < c.width; ++p) {
    for (int64_t n = 0; n < c.state; ++n) state[n * l.x_row + p] = c.initial[at + p * c.state + n];
  }
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t first = chunk * CHUNK, count = tokens_of(c, chunk);
    time_steps(c, b, head, first, count, steps, decays);
    read_tokens(c.x, c.length, b, first, count, head, c.width, x, l.x_row);
    read_tokens(c.C, c.length, b, first, count, group, c.state, C, l.state_row);
    read_tokens(c.B, c.length, b, first, count, group, c.state, B, l.state_row);
    for (int64_t i = 0; i < count; ++i) {
      const Floats step = broadcast(steps[i]);
      for (int64_t p = 0; p < l.x_row; p += WIDTH) store(x + i * l.x_row + p, multiply(load(x + i * l.x_row + p), step));
    }
    // between[j]: the product of the decays of tokens j+1..i, a row of which follows from that before it
    const float* scores = scores_of(c, b, group, chunk);
    memset(between, 0, CHUNK * sizeof *between);
    memset(pairs, 0, CHUNK * CHUNK * sizeof *pairs);
    float before = 1.0f;
    for (int64_t i = 0; i < count; ++i) {
      const Floats decay = broadcast(decays[i]);
      before *= decays[i];
      for (int64_t j = 0; j < i; j += WIDTH) store(between + j, multiply(load(between + j), decay));
      between[i] = 1.0f;
      for (int64_t j = 0; j <= i; j += WIDTH) {
        store(pairs + i * CHUNK + j, multiply(load(between + j), load(scores + i * CHUNK + j)));
      }
      const Floats factor = broadcast(before);
      float* row = C + i * l.state_row;
      for (int64_t n = 0; n < c.state; n += WIDTH) store(row + n, multiply(load(row + n), factor));
    }
    multiply_matrices({pairs, CHUNK, 1}, count, count, x, l.x_row, c.width, 0.0f, y, l.x_row, LOWER_LEFT);
    multiply_matrices({C, l.state_row, 1}, count, c.state, state, l.x_row, c.width, 1.0f, y, l.x_row);
    for (int64_t j = 0; j < count; ++j) {
      const Floats after = broadcast(between[j]);
      for (int64_t p = 0; p < l.x_row; p += WIDTH) {
        store(given + j * l.x_row + p, multiply(load(x + j * l.x_row + p), after));
      }
    }
    multiply_matrices({B, 1, l.state_row}, c.state, count, given, l.x_row, c.width, before, state, l.x_row);
    for (int64_t i = 0; i < count; ++i) finish(c, b, first + i, head, y + i * l.x_row);
  }
  for (int64_t p = 0; p < c.width; ++p) {
    for (int64_t n = 0; n < c.state; ++n) c.final[at + p * c.state + n] = state[n * l.x_row + p];
  }
}

// Rows of a state, one or four: decay * state + given * B, and the products with C.
template <int ROWS>
inline void step_rows(const float* from, float* to, int64_t count, float decay, const float* given, const float* B,
                      const float* C, float* y) {
  Floats totals[4] = {zeros(), zeros(), zeros(), zeros()};
  const Floats factor = broadcast(decay);
  for (int64_t n = 0; n < count; n += WIDTH) {
    const Floats b = load(B + n), c = load(C + n);
    const int64_t left = count - n;
    for (int r = 0; r < ROWS; ++r) {
      const Floats new_ = multiply(b, broadcast(given[r]));
      const Floats old = from == nullptr ? zeros() : read_some<NumbersFloat32>(from + r * count + n, left);
      const Floats now = multiply_add(old, factor, new_);
      write_some<NumbersFloat32>(to + r * count + n, left, now);
      totals[r] = multiply_add(now, c, totals[r]);
    }
  }
  float sums[4];
  sum4(totals[0], totals[1], totals[2], totals[3], sums);
  for (int r = 0; r < ROWS; ++r) y[r] = sums[r];
}

void step(const Ssm2Call* call, int64_t b, int64_t head, float* scratch) {
  const Ssm2Call& c = *call;
  const Layout l(c);
  const int64_t group = head / (c.heads / c.groups), at = (b * c.heads + head) * c.width * c.state;
  float *x = scratch, *y = x + l.x_row, *B = y + l.x_row, *C = B + l.state_row, *steps = C + l.state_row;
  float* decays = steps + CHUNK;
  const float* from = c.initial == nullptr ? nullptr : c.initial + at;
  float* to = c.final + at;
  for (int64_t t = 0; t < c.length; ++t, from = to) {
    time_steps(c, b, head, t, 1, steps, decays);
    read_row(row_of(c.x, b, t, head), c.width, c.x.dtype, x);
    read_row(row_of(c.B, b, t, group), c.state, c.B.dtype, B);
    read_row(row_of(c.C, b, t, group), c.state, c.C.dtype, C);
    const Floats given = broadcast(steps[0]);
    for (int64_t p = 0; p < l.x_row; p += WIDTH) store(x + p, multiply(load(x + p), given));
    int64_t p = 0;
    for (; p + 4 <= c.width; p += 4) {
      const int64_t row = p * c.state;
      step_rows<4>(from == nullptr ? nullptr : from + row, to + row, c.state, decays[0], x + p, B, C, y + p);
    }
    for (; p < c.width; ++p) {
      const int64_t row = p * c.state;
      step_rows<1>(from == nullptr ? nullptr : from + row, to + row, c.state, decays[0], x + p, B, C, y + p);
    }
    finish(c, b, t, head, y);
  }
}

}  // namespace

extern const Ssm2Functions EASYTORCH_NAME(ssm2);
const Ssm2Functions EASYTORCH_NAME(ssm2) = {sizes, score, scan, step};
