// The gradients of the selective scan, token by token, with the states of some channels in the caches. One state in CHUNK
// is kept going forward; going backward those between are computed again.
#include "cpu_scan_backward.h"

#include "../cpu/functions.h"
#include "../cpu/rows.h"

namespace {

// Vectors of channels of a task, and tokens between the states that are kept.
constexpr int64_t VECTORS = 4, CHANNELS = VECTORS * WIDTH, CHUNK = 32;

inline void zero(float* to, int64_t count) { memset(to, 0, static_cast<size_t>(count) * sizeof *to); }

// The memory of a task. A state has a row of CHANNELS numbers for each of its N.
struct Memory {
  int64_t size, row;  // numbers of a state; N up to whole vectors
  float *A, *of_A, *state, *gradient;
  float *between, *decays, *kept;  // before and after each token of a chunk; of each token; before the chunks
  float *B, *C, *of_B, *of_C;      // of a token; the last two in vectors that are still to be added up
  float *sums_B, *sums_C;
  int64_t numbers;

  Memory(const Ssm1Call& c, float* start) {
    size = c.state * CHANNELS, row = (c.state + WIDTH - 1) / WIDTH * WIDTH;
    float* p = start;
    const auto take = [&p](int64_t count) {
      float* const taken = p;
      p += count;
      return taken;
    };
    A = take(size), of_A = take(size), state = take(size), gradient = take(size);
    between = take((CHUNK + 1) * size), decays = take(CHUNK * size);
    kept = take((c.length + CHUNK - 1) / CHUNK * size);
    B = take(row), C = take(row), of_B = take(row * WIDTH), of_C = take(row * WIDTH);
    sums_B = take(row), sums_C = take(row);
    numbers = p - start;
  }
};

// The channels [channel, channel + count) of a sequence.
struct Block {
  int64_t b, channel, count;
  int64_t vectors() const { return (count + WIDTH - 1) / WIDTH; }
};

// The states (C, N) of the channels, transposed; zeros where there are none.
inline void read_states(const float* from, const Block& at, int64_t states, float* to) {
  zero(to, states * CHANNELS);
  for (int64_t i = 0; from != nullptr && i < at.count; ++i) {
    for (int64_t n = 0; n < states; ++n) to[n * CHANNELS + i] = from[i * states + n];
  }
}
inline void write_states(const float* from, const Block& at, int64_t states, float* to) {
  for (int64_t i = 0; i < at.count; ++i) {
    for (int64_t n = 0; n < states; ++n) to[i * states + n] = from[n * CHANNELS + i];
  }
}

inline Floats read_channels(const Strided& t, const Block& at, int64_t token, int64_t vector) {
  const int64_t left = at.count - vector * WIDTH;
  return read_vector(number_at(row_of(t, at.b, token, 0), at.channel + vector * WIDTH, t.dtype), left, t.dtype);
}
inline void write_channels(float* to, const Ssm1Call& c, const Block& at, int64_t token, int64_t vector, Floats v) {
  to += (at.b * c.length + token) * c.channels + at.channel + vector * WIDTH;
  write_some<NumbersFloat32>(to, at.count - vector * WIDTH, v);
}

// The states after a token from those before it; decays: where they are kept, or null.
void advance(const Ssm1Call& c, const Block& at, int64_t token, const float* from, float* to, float* decays,
             const Memory& m) {
  read_row(row_of(c.B, at.b, token, 0), c.state, c.B.dtype, m.B);
  for (int64_t v = 0; v < at.vectors(); ++v) {
    const Floats step = read_channels(c.dt, at, token, v), given = multiply(step, read_channels(c.x, at, token, v));
    for (int64_t n = 0, place = v * WIDTH; n < c.state; ++n, place += CHANNELS) {
      const Floats decay = exponential_of_any(multiply(step, load(m.A + place)));
      if (decays != nullptr) store(decays + place, decay);
      store(to + place, multiply_add(decay, load(from + place), multiply(given, broadcast(m.B[n]))));
    }
  }
}

// The gradients that go through a token: m.gradient, of the states after it, becomes that of the states before.
void go_back(const Ssm1GradientCall& g, const Block& at, int64_t token, const float* before, const float* after,
             const float* decays, float* to_B, float* to_C, const Memory& m) {
  const Ssm1Call& c = g.call;
  read_row(row_of(c.B, at.b, token, 0), c.state, c.B.dtype, m.B);
  read_row(row_of(c.C, at.b, token, 0), c.state, c.C.dtype, m.C);
  zero(m.of_B, m.row * WIDTH), zero(m.of_C, m.row * WIDTH);
  for (int64_t v = 0; v < at.vectors(); ++v) {
    const Floats out = read_channels(g.grad, at, token, v), x = read_channels(c.x, at, token, v);
    const Floats step = read_channels(c.dt, at, token, v), given = multiply(step, x);
    Floats of_given = zeros(), of_step = zeros();
    for (int64_t n = 0, place = v * WIDTH; n < c.state; ++n, place += CHANNELS) {
      const Floats gradient = multiply_add(out, broadcast(m.C[n]), load(m.gradient + place));
      store(m.of_C + n * WIDTH, multiply_add(out, load(after + place), load(m.of_C + n * WIDTH)));
      store(m.of_B + n * WIDTH, multiply_add(given, gradient, load(m.of_B + n * WIDTH)));
      of_given = multiply_add(gradient, broadcast(m.B[n]), of_given);
      const Floats carried = multiply(gradient, load(decays + place));
      store(m.gradient + place, carried);
      const Floats of_log = multiply(carried, load(before + place));  // of step * A
      of_step = multiply_add(of_log, load(m.A + place), of_step);
      store(m.of_A + place, multiply_add(of_log, step, load(m.of_A + place)));
    }
    write_channels(g.grad_x, c, at, token, v, multiply(of_given, step));
    write_channels(g.grad_dt, c, at, token, v, multiply_add(of_given, x, of_step));
  }
  for (int64_t n = 0; n < c.state; n += 4) {  // whole vectors are a multiple of four
    const float *b = m.of_B + n * WIDTH, *c4 = m.of_C + n * WIDTH;
    sum4(load(b), load(b + WIDTH), load(b + 2 * WIDTH), load(b + 3 * WIDTH), m.sums_B + n);
    sum4(load(c4), load(c4 + WIDTH), load(c4 + 2 * WIDTH), load(c4 + 3 * WIDTH), m.sums_C + n);
  }
  for (int64_t n = 0; n < c.state; ++n) {
    to_B[token * c.state + n] += m.sums_B[n], to_C[token * c.state + n] += m.sums_C[n];
  }
}

void run(const Ssm1GradientCall* call, int64_t b, int64_t channel, float* of_B, float* of_C, float* scratch) {
  const Ssm1GradientCall& g = *call;
  const Ssm1Call& c = g.call;
  const Memory m(c, scratch);
  const Block at{b, channel, c.channels - channel < CHANNELS ? c.channels - channel : CHANNELS};
  const int64_t first_state = (b * c.channels + channel) * c.state, chunks = (c.length + CHUNK - 1) / CHUNK;
  const size_t bytes = static_cast<size_t>(m.size) * sizeof(float);
  read_states(c.A + channel * c.state, at, c.state, m.A);
  zero(m.of_A, m.size), zero(m.between, (CHUNK + 1) * m.size);
  read_states(c.initial == nullptr ? nullptr : c.initial + first_state, at, c.state, m.state);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    memcpy(m.kept + chunk * m.size, m.state, bytes);
    for (int64_t t = chunk * CHUNK; chunk + 1 < chunks && t < (chunk + 1) * CHUNK; ++t) {
      if (c.documents.begins(b, t)) zero(m.state, m.size);
      advance(c, at, t, m.state, m.state, nullptr, m);
    }
  }
  read_states(g.final_grad == nullptr ? nullptr : g.final_grad + first_state, at, c.state, m.gradient);
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t first = chunk * CHUNK, count = c.length - first < CHUNK ? c.length - first : CHUNK;
    // a token's states after it are those before the next, but where that begins a segment
    memcpy(m.between, m.kept + chunk * m.size, bytes);
    for (int64_t i = 0; i < count; ++i) {
      const bool begins = c.documents.begins(b, first + i);
      if (begins) zero(m.state, m.size);
      advance(c, at, first + i, begins ? m.state : m.between + i * m.size, m.between + (i + 1) * m.size,
              m.decays + i * m.size, m);
    }
    for (int64_t i = count - 1; i >= 0; --i) {
      const bool begins = c.documents.begins(b, first + i);
      if (begins) zero(m.state, m.size);
      const float* const before = begins ? m.state : m.between + i * m.size;
      go_back(g, at, first + i, before, m.between + (i + 1) * m.size, m.decays + i * m.size, of_B, of_C, m);
      if (begins) zero(m.gradient, m.size);
    }
  }
  write_states(m.gradient, at, c.state, g.grad_initial + first_state);
  write_states(m.of_A, at, c.state, g.grad_A + first_state);
}

Ssm1Sizes sizes(const Ssm1GradientCall* call) { return {CHANNELS, Memory(call->call, nullptr).numbers}; }

}  // namespace

extern const Ssm1Gradient EASYTORCH_NAME(ssm1_gradient);
const Ssm1Gradient EASYTORCH_NAME(ssm1_gradient) = {sizes, run};
