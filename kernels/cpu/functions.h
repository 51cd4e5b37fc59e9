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

// 2**x, 0 below -126, for x of at most 127; 1 for 0. SHORT: within 3e-6 of it, for what is rounded to 16 bits. The
// polynomials are those of 0 to 1 with 1 at 0 whose largest relative error is least.
template <bool SHORT>
inline Floats power_of_two(Floats x) {
#if defined(__AVX512F__)
  const Floats r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x less the integer below it
#else
  const Floats given = x;
  x = maximum(broadcast(-126.0f), x);  // in this order NaN stays
  const Floats n = rounded(add(x, broadcast(-0.5f)));
  const Floats r = add(x, multiply(n, broadcast(-1.0f)));
#endif
  Floats y;
  if (SHORT) {
    y = broadcast(1.342668427e-2f);
    y = multiply_add(y, r, broadcast(5.224247422e-2f));
    y = multiply_add(y, r, broadcast(2.412802048e-1f));
    y = multiply_add(y, r, broadcast(6.930448449e-1f));
  } else {
    y = broadcast(2.161291495e-4f);
    y = multiply_add(y, r, broadcast(1.246784645e-3f));
    y = multiply_add(y, r, broadcast(9.675451567e-3f));
    y = multiply_add(y, r, broadcast(5.548528062e-2f));
    y = multiply_add(y, r, broadcast(2.402293056e-1f));
    y = multiply_add(y, r, broadcast(6.931470444e-1f));
  }
  y = multiply_add(y, r, broadcast(1.0f));
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, broadcast(-126.0f), _CMP_NLT_UQ), y, x);  // by 2**floor(x)
#else
  return where_less(given, broadcast(-126.0f), zeros(), scaled(y, n));
#endif
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

// x * sigmoid(z). `exponential` goes up to 88; below -88 the sigmoid is subnormal: 0 here, which gives NaN for an x of
// -infinity as in the definition.
inline Floats times_sigmoid(Floats x, Floats z) {
  const Floats power = exponential(minimum(broadcast(88.0f), multiply(z, broadcast(-1.0f))));
  return where_less(z, broadcast(-88.0f), multiply(x, zeros()), divide(x, add(broadcast(1.0f), power)));
}

inline Floats silu(Floats x) { return times_sigmoid(x, x); }

// log(1 + u) for u of 0 to 1: 2 artanh(s) with s = u / (2 + u), which is at most 1/3.
inline Floats log1p_of_unit(Floats u) {
  const Floats s = divide(u, add(u, broadcast(2.0f))), square = multiply(s, s);
  Floats y = broadcast(2.0f / 15.0f);
  y = multiply_add(y, square, broadcast(2.0f / 13.0f));
  y = multiply_add(y, square, broadcast(2.0f / 11.0f));
  y = multiply_add(y, square, broadcast(2.0f / 9.0f));
  y = multiply_add(y, square, broadcast(2.0f / 7.0f));
  y = multiply_add(y, square, broadcast(2.0f / 5.0f));
  y = multiply_add(y, square, broadcast(2.0f / 3.0f));
  y = multiply_add(y, square, broadcast(2.0f));
  return multiply(y, s);
}

// log(1 + exp(x)), which is max(x, 0) + log(1 + exp(-|x|)).
inline Floats softplus(Floats x) {
  const Floats minus = multiply(x, broadcast(-1.0f)), size = where_less(x, zeros(), x, minus);
  return add(maximum(zeros(), x), log1p_of_unit(exponential(size)));
}

// exp(x) for any x: infinity from 88.8 on.
inline Floats exponential_of_any(Floats x) { return exponential(minimum(broadcast(88.8f), x)); }

}  // namespace
