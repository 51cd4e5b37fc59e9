// Functions of vectors of float32, within two units of the last place; NaN gives NaN.
#pragma once

#include "vector.h"

namespace {

constexpr float LOWEST = -87.3f;  // below it a result would be subnormal: 0

// exp(x), 0 below LOWEST, for x of at most 88. The polynomial is that of Cephes (Moshier, expf.c).
inline Floats exponential(Floats x) {
  const Floats clamped = maximum(broadcast(LOWEST), x);  // in this order NaN stays
  const Floats n = rounded(multiply(clamped, broadcast(1.44269504088896341f)));
  Floats r = multiply_add(n, broadcast(-0.693359375f), clamped);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Floats y = broadcast(1.9875691500e-4f);
  y = multiply_add(y, r, broadcast(1.3981999507e-3f));
  y = multiply_add(y, r, broadcast(8.3334519073e-3f));
  y = multiply_add(y, r, broadcast(4.1665795894e-2f));
  y = multiply_add(y, r, broadcast(1.6666665459e-1f));
  y = multiply_add(y, r, broadcast(5.0000001201e-1f));
  y = multiply_add(y, multiply(r, r), add(r, broadcast(1.0f)));
  return where_less(x, broadcast(LOWEST), zeros(), scaled(y, n));
}

// tanh(x): a polynomial near 0, where 1 - 2 / (1 + exp(2 |x|)) would lose digits.
inline Floats hyperbolic_tangent(Floats x) {
  const Floats one = broadcast(1.0f), square = multiply(x, x);
  const Floats size = where_less(x, zeros(), multiply(x, broadcast(-1.0f)), x);
  const Floats power = exponential(minimum(broadcast(20.0f), multiply(size, broadcast(2.0f))));
  const Floats far = add(one, divide(broadcast(-2.0f), add(one, power)));
  Floats near = broadcast(62.0f / 2835.0f);
  near = multiply_add(near, square, broadcast(-17.0f / 315.0f));
  near = multiply_add(near, square, broadcast(2.0f / 15.0f));
  near = multiply_add(near, square, broadcast(-1.0f / 3.0f));
  near = multiply_add(multiply(near, square), x, x);
  return where_less(size, broadcast(0.25f), near, where_less(x, zeros(), multiply(far, broadcast(-1.0f)), far));
}

}  // namespace
