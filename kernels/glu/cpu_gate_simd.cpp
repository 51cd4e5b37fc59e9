#include "cpu_gate.h"

#include "../cpu/functions.h"
#include "../cpu/numbers.h"

namespace {

// Phi(x) = erfc(-z) / 2 with z = x / sqrt(2). The polynomial is that of Numerical Recipes (erfcc), whose
// relative error is below 1.2e-7 in the tails too, where 1 + erf(z) cancels; its constant term has the logarithm of 1/2.
inline Floats normal_share(Floats x) {
  const Floats one = broadcast(1.0f), z = multiply(x, broadcast(0.70710678118654752f));
  const Floats size = maximum(multiply(z, broadcast(-1.0f)), z);
  const Floats t = divide(one, multiply_add(size, broadcast(0.5f), one));
  // pairs of terms (Estrin), so that one need not wait for the other
  const Floats t2 = multiply(t, t), t4 = multiply(t2, t2);
  const Floats a = multiply_add(broadcast(1.00002368f), t, broadcast(-1.26551223f - 0.69314718f));
  const Floats b = multiply_add(broadcast(0.09678418f), t, broadcast(0.37409196f));
  const Floats c = multiply_add(broadcast(0.27886807f), t, broadcast(-0.18628806f));
  const Floats d = multiply_add(broadcast(1.48851587f), t, broadcast(-1.13520398f));
  const Floats e = multiply_add(broadcast(0.17087277f), t, broadcast(-0.82215223f));
  Floats y = multiply_add(multiply_add(e, t4, multiply_add(d, t2, c)), t4, multiply_add(b, t2, a));
  y = multiply_add(multiply(size, broadcast(-1.0f)), size, y);
  const Floats tail = multiply(t, exponential(y));  // erfc(|z|) / 2
  return where_less(z, zeros(), tail, multiply_add(tail, broadcast(-1.0f), one));
}

inline Floats gelu(Floats x) { return multiply(x, normal_share(x)); }

// (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel in the tail.
inline Floats twice_the_angle(Floats x) {
  const Floats cube = multiply(multiply(x, x), x);
  return multiply(multiply_add(cube, broadcast(0.044715f), x), broadcast(1.5957691216057308f));
}

inline Floats gelu_tanh(Floats x) { return times_sigmoid(x, twice_the_angle(x)); }

// An activation and its derivative.
struct Derived {
  Floats value, slope;
};

// x * s with s = sigmoid(z), where z has the derivative `slope`.
inline Derived of_sigmoid(Floats x, Floats z, Floats slope) {
  const Floats one = broadcast(1.0f), s = times_sigmoid(one, z), value = multiply(x, s);
  // the share that is left first: it is 0 where x * slope may overflow
  return {value, multiply_add(multiply(value, multiply_add(s, broadcast(-1.0f), one)), slope, s)};
}
inline Derived derived_silu(Floats x) { return of_sigmoid(x, x, broadcast(1.0f)); }
inline Derived derived_gelu_tanh(Floats x) {
  const Floats slope = multiply_add(multiply(x, x), broadcast(3 * 0.044715f * 1.5957691216057308f), broadcast(1.5957691216057308f));
  return of_sigmoid(x, twice_the_angle(x), slope);
}
inline Derived derived_gelu(Floats x) {
  const Floats share = normal_share(x), density = exponential(multiply(multiply(x, x), broadcast(-0.5f)));
  return {multiply(x, share), multiply_add(multiply(x, broadcast(0.3989422804014327f)), density, share)};
}

template <class Numbers, Floats activate(Floats)>
void gate_row(const void* gates, const void* ups, void* to, int64_t n) {
  typedef typename Numbers::Number Number;
  const Number *gate = static_cast<const Number*>(gates), *up = static_cast<const Number*>(ups);
  Number* y = static_cast<Number*>(to);
  for (int64_t i = 0; i < n; i += WIDTH) {
    const Floats x = read_some<Numbers>(gate + i, n - i);
    const Floats active = Numbers::round(activate(x));
    write_some<Numbers>(y + i, n - i, multiply(active, read_some<Numbers>(up + i, n - i)));
  }
}

template <class Numbers, Derived derive(Floats)>
void gradient_row(const void* grads, const void* gates, const void* ups, void* to_gate, void* to_up, int64_t n) {
  typedef typename Numbers::Number Number;
  const Number *grad = static_cast<const Number*>(grads), *gate = static_cast<const Number*>(gates);
  const Number* up = static_cast<const Number*>(ups);
  Number *gate_grad = static_cast<Number*>(to_gate), *up_grad = static_cast<Number*>(to_up);
  for (int64_t i = 0; i < n; i += WIDTH) {
    const Floats g = read_some<Numbers>(grad + i, n - i), u = read_some<Numbers>(up + i, n - i);
    const Derived d = derive(read_some<Numbers>(gate + i, n - i));
    write_some<Numbers>(gate_grad + i, n - i, multiply(multiply(g, u), d.slope));
    write_some<Numbers>(up_grad + i, n - i, multiply(g, Numbers::round(d.value)));
  }
}

template <class Numbers>
void gradient_row_by(const void* grad, const void* gate, const void* up, void* gate_grad, void* up_grad, int64_t n,
                     int64_t activation) {
  switch (activation) {
    case SILU: return gradient_row<Numbers, derived_silu>(grad, gate, up, gate_grad, up_grad, n);
    case GELU: return gradient_row<Numbers, derived_gelu>(grad, gate, up, gate_grad, up_grad, n);
    case GELU_TANH: return gradient_row<Numbers, derived_gelu_tanh>(grad, gate, up, gate_grad, up_grad, n);
  }
}

template <class Numbers>
void gate_row_by(const void* gate, const void* up, void* y, int64_t n, int64_t activation) {
  switch (activation) {
    case SILU: return gate_row<Numbers, silu>(gate, up, y, n);
    case GELU: return gate_row<Numbers, gelu>(gate, up, y, n);
    case GELU_TANH: return gate_row<Numbers, gelu_tanh>(gate, up, y, n);
  }
}

void run(const void* gate, const void* up, void* y, int64_t n, int32_t dtype, int64_t activation) {
  switch (dtype) {
    case FLOAT32: return gate_row_by<NumbersFloat32>(gate, up, y, n, activation);
    case BFLOAT16: return gate_row_by<NumbersBFloat16>(gate, up, y, n, activation);
    case FLOAT16: return gate_row_by<NumbersFloat16>(gate, up, y, n, activation);
  }
}

void backward(const void* grad, const void* gate, const void* up, void* gate_grad, void* up_grad, int64_t n,
              int32_t dtype, int64_t activation) {
  switch (dtype) {
    case FLOAT32: return gradient_row_by<NumbersFloat32>(grad, gate, up, gate_grad, up_grad, n, activation);
    case BFLOAT16: return gradient_row_by<NumbersBFloat16>(grad, gate, up, gate_grad, up_grad, n, activation);
    case FLOAT16: return gradient_row_by<NumbersFloat16>(grad, gate, up, gate_grad, up_grad, n, activation);
  }
}

}  // namespace

extern const GateFunctions EASYTORCH_NAME(gate);
const GateFunctions EASYTORCH_NAME(gate) = {run, backward};
