// The selective scan, token by token, with the states of some channels in the L1 cache.
#include "cpu_scan.h"

#include "../cpu/functions.h"
#include "../cpu/rows.h"

namespace {

// Vectors of channels of a task: a token's B and C are read once for all of them.
constexpr int64_t VECTORS = 4, CHANNELS = VECTORS * WIDTH;

inline int64_t state_row(const Ssm1Call& c) { return (c.state + WIDTH - 1) / WIDTH * WIDTH; }

Ssm1Sizes sizes(const Ssm1Call* call) {
  // the state and A, state by state, or a channel's sums; a token's B and C; steps, inputs and outputs
  return {CHANNELS, 2 * (call->state + 1) * CHANNELS + 2 * state_row(*call) + 4 * CHANNELS};
}

// What the time step is of a vector of dt.
inline Floats time_step(const Ssm1Call& c, Floats dt, Floats bias) {
  dt = add(dt, bias);
  return c.softplus ? softplus(dt) : dt;
}

inline Floats bias_of(const Ssm1Call& c, int64_t channel, int64_t left) {
  if (c.dt_bias.data == nullptr) return zeros();
  return read_vector(number_at(c.dt_bias.data, channel, c.dt_bias.dtype), left, c.dt_bias.dtype);
}

// (y + D * x) * silu(z) of a vector of channels.
inline void finish(const Ssm1Call& c, int64_t b, int64_t token, int64_t channel, int64_t left, Floats x, Floats y) {
  if (c.D.data != nullptr) {
    y = add(y, multiply(x, read_vector(number_at(c.D.data, channel, c.D.dtype), left, c.D.dtype)));
  }
  if (c.z.data != nullptr) {
    y = multiply(y, silu(read_vector(number_at(row_of(c.z, b, token, 0), channel, c.z.dtype), left, c.z.dtype)));
  }
  write_vector(number_at(c.output, (b * c.length + token) * c.channels + channel, c.x.dtype), left, c.x.dtype, y);
}

// A vector has a number of each of WIDTH channels.
void scan(const Ssm1Call* call, int64_t b, int64_t channel, float* scratch) {
  const Ssm1Call& c = *call;
  const int64_t count = c.channels - channel < CHANNELS ? c.channels - channel : CHANNELS, size = c.state;
  const int64_t vectors = (count + WIDTH - 1) / WIDTH;
  float *state = scratch, *A = state + (size + 1) * CHANNELS, *B = A + (size + 1) * CHANNELS, *C = B + state_row(c);
  memset(scratch, 0, static_cast<size_t>(2 * (size + 1) * CHANNELS) * sizeof *scratch);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = (channel + i) * size;
    for (int64_t n = 0; n < size; ++n) {
      A[n * CHANNELS + i] = c.A[row + n];
      if (c.initial != nullptr) state[n * CHANNELS + i] = c.initial[b * c.channels * size + row + n];
    }
  }
  for (int64_t t = 0; t < c.length; ++t) {
    read_row(row_of(c.B, b, t, 0), size, c.B.dtype, B);
    read_row(row_of(c.C, b, t, 0), size, c.C.dtype, C);
    if (c.documents.begins(b, t)) memset(state, 0, static_cast<size_t>(size * CHANNELS) * sizeof *state);
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t at = channel + v * WIDTH, left = count - v * WIDTH;
      const Floats x = read_vector(number_at(row_of(c.x, b, t, 0), at, c.x.dtype), left, c.x.dtype);
      const Floats dt = read_vector(number_at(row_of(c.dt, b, t, 0), at, c.dt.dtype), left, c.dt.dtype);
      const Floats step = time_step(c, dt, bias_of(c, at, left)), given = multiply(step, x);
      Floats y = zeros();
      float* states = state + v * WIDTH;
      const float* rates = A + v * WIDTH;
      for (int64_t n = 0; n < size; ++n, states += CHANNELS, rates += CHANNELS) {
        const Floats decay = exponential_of_any(multiply(step, load(rates)));
        const Floats now = multiply_add(decay, load(states), multiply(given, broadcast(B[n])));
        store(states, now);
        y = multiply_add(now, broadcast(C[n]), y);
      }
      finish(c, b, t, at, left, x, y);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    float* to = c.final + (b * c.channels + channel + i) * size;
    for (int64_t n = 0; n < size; ++n) to[n] = state[n * CHANNELS + i];
  }
}

// A vector has WIDTH numbers of the state of one channel, as it lies in memory.
void step(const Ssm1Call* call, int64_t b, int64_t channel, float* scratch) {
  const Ssm1Call& c = *call;
  const int64_t count = c.channels - channel < CHANNELS ? c.channels - channel : CHANNELS, size = c.state;
  float *steps = scratch, *given = steps + CHANNELS, *sums = given + CHANNELS, *B = sums + CHANNELS, *C = B + state_row(c);
  const int64_t first = (b * c.channels + channel) * size;
  const float* from = c.initial == nullptr ? nullptr : c.initial + first;
  float* to = c.final + first;
  for (int64_t t = 0; t < c.length; ++t, from = to) {
    read_row(row_of(c.B, b, t, 0), size, c.B.dtype, B);
    read_row(row_of(c.C, b, t, 0), size, c.C.dtype, C);
    const bool begins = c.documents.begins(b, t);
    for (int64_t i = 0; i < count; i += WIDTH) {
      const int64_t at = channel + i, left = count - i;
      const Floats x = read_vector(number_at(row_of(c.x, b, t, 0), at, c.x.dtype), left, c.x.dtype);
      const Floats dt = read_vector(number_at(row_of(c.dt, b, t, 0), at, c.dt.dtype), left, c.dt.dtype);
      const Floats step = time_step(c, dt, bias_of(c, at, left));
      store(steps + i, step);
      store(given + i, multiply(step, x));
    }
    for (int64_t i = 0; i < count; ++i) {
      const Floats factor = broadcast(steps[i]), new_ = broadcast(given[i]);
      Floats total = zeros();
      for (int64_t n = 0; n < size; n += WIDTH) {
        const int64_t at = i * size + n, left = size - n;
        Floats now = multiply(new_, load(B + n));
        if (from != nullptr && !begins) {
          const Floats decay =
              exponential_of_any(multiply(factor, read_some<NumbersFloat32>(c.A + channel * size + at, left)));
          now = multiply_add(decay, read_some<NumbersFloat32>(from + at, left), now);
        }
        write_some<NumbersFloat32>(to + at, left, now);
        total = multiply_add(now, load(C + n), total);
      }
      sums[i] = sum(total);
    }
    for (int64_t i = 0; i < count; i += WIDTH) {
      const Floats x = read_vector(number_at(row_of(c.x, b, t, 0), channel + i, c.x.dtype), count - i, c.x.dtype);
      finish(c, b, t, channel + i, count - i, x, load(sums + i));
    }
  }
}

}  // namespace

extern const Ssm1Functions EASYTORCH_NAME(ssm1);
const Ssm1Functions EASYTORCH_NAME(ssm1) = {sizes, scan, step};
