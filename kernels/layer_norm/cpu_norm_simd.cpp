#include "cpu_norm.h"

#include <math.h>

#include "../cpu/rows.h"

namespace {

// Sums that are added in turn, so that one addition need not wait for the other.
constexpr int SUMS = 4;

struct Sums {
  Floats parts[SUMS] = {zeros(), zeros(), zeros(), zeros()};
  float total() const { return sum(add(add(parts[0], parts[1]), add(parts[2], parts[3]))); }
};

// body(i, part) for each vector of the row, `part` in turn.
template <class Body>
inline void each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + SUMS * WIDTH <= n; i += SUMS * WIDTH) {
#pragma GCC unroll 4
    for (int part = 0; part < SUMS; ++part) body(i + part * WIDTH, part);
  }
  for (; i < n; i += WIDTH) body(i, 0);
}

// How a row is normalized: (value + minus) * factor, with minus the mean where it is centered, else 0.
struct Normalization {
  Floats minus, factor;
  Floats of(Floats value) const { return multiply(add(value, minus), factor); }
};

// The row as float32 to `values`, and up to whole vectors what becomes 0; factor is 1 / sqrt(the mean square of what is
// left + eps).
template <class Numbers>
inline Normalization statistics(const void* from, int64_t n, float eps, bool centered, float* values) {
  const typename Numbers::Number* x = static_cast<const typename Numbers::Number*>(from);
  Sums sums, squares;
  each_vector(n, [&](int64_t i, int part) {
    const Floats v = read_some<Numbers>(x + i, n - i);
    store(values + i, v);
    sums.parts[part] = add(sums.parts[part], v);
  });
  const float numbers = static_cast<float>(n), mean = centered ? sums.total() / numbers : 0.0f;
  for (int64_t i = n; i < (n + WIDTH - 1) / WIDTH * WIDTH; ++i) values[i] = mean;
  const Floats minus = broadcast(-mean);
  each_vector(n, [&](int64_t i, int part) {
    const Floats v = add(load(values + i), minus);
    squares.parts[part] = multiply_add(v, v, squares.parts[part]);
  });
  return {minus, broadcast(1.0f / sqrtf(squares.total() / numbers + eps))};
}

// A weight of the row's dtype is read in it: half as much as float32 has less to keep in the L1 cache.
template <class Weights>
struct Weight {
  const typename Weights::Number* numbers;
  int64_t n;
  Weight(const void* data, int64_t count) : numbers(static_cast<const typename Weights::Number*>(data)), n(count) {}
  Floats times(Floats v, int64_t i) const {
    return numbers == nullptr ? v : multiply(v, read_some<Weights>(numbers + i, n - i));
  }
};

template <class Numbers, class Weights>
void backward_as(const void* grads, const void* x, const void* weights, void* to, float* grad_weight, float* grad_bias,
                 float* values, int64_t n, float eps, bool centered) {
  typedef typename Numbers::Number Number;
  const Number* grad = static_cast<const Number*>(grads);
  Number* grad_x = static_cast<Number*>(to);
  const Normalization row = statistics<Numbers>(x, n, eps, centered, values);
  const Weight<Weights> weight(weights, n);
  Sums sums, products;
  each_vector(n, [&](int64_t i, int part) {
    const Floats g = read_some<Numbers>(grad + i, n - i), v = row.of(load(values + i)), s = weight.times(g, i);
    sums.parts[part] = add(sums.parts[part], s);
    products.parts[part] = multiply_add(s, v, products.parts[part]);
    store(grad_weight + i, multiply_add(g, v, load(grad_weight + i)));
    if (centered) store(grad_bias + i, add(load(grad_bias + i), g));
  });
  const float numbers = static_cast<float>(n);
  const Floats minus = broadcast(centered ? -sums.total() / numbers : 0.0f);
  const Floats along = broadcast(-products.total() / numbers);
  each_vector(n, [&](int64_t i, int) {
    const Floats s = add(weight.times(read_some<Numbers>(grad + i, n - i), i), minus);
    write_some<Numbers>(grad_x + i, n - i, multiply(multiply_add(row.of(load(values + i)), along, s), row.factor));
  });
}

// By the dtype of rows, and whether the weight has it or is float32.
#define BY_DTYPE(function, ...)                                                               \
  if (dtype == FLOAT32) return function<NumbersFloat32, NumbersFloat32>(__VA_ARGS__);         \
  if (dtype == BFLOAT16) {                                                                    \
    return alike ? function<NumbersBFloat16, NumbersBFloat16>(__VA_ARGS__)                    \
                 : function<NumbersBFloat16, NumbersFloat32>(__VA_ARGS__);                    \
  }                                                                                           \
  return alike ? function<NumbersFloat16, NumbersFloat16>(__VA_ARGS__)                        \
               : function<NumbersFloat16, NumbersFloat32>(__VA_ARGS__)

void backward(const void* grad, const void* x, const void* weight, void* grad_x, float* grad_weight, float* grad_bias,
              float* scratch, int64_t n, int32_t dtype, bool alike, float eps, bool centered) {
  BY_DTYPE(backward_as, grad, x, weight, grad_x, grad_weight, grad_bias, scratch, n, eps, centered);
}

void narrow(const float* from, int64_t n, int32_t dtype, void* to) { write_row(to, n, dtype, from); }
void widen(const void* from, int64_t n, int32_t dtype, float* to) { read_row(from, n, dtype, to); }

}  // namespace

extern const NormGradient EASYTORCH_NAME(norm_gradient);
const NormGradient EASYTORCH_NAME(norm_gradient) = {widen, narrow, backward};
