#include "cpu_norm.h"

#include <math.h>

#include "../cpu/numbers.h"

namespace {

// Sums of squares that are added in turn, so that one addition need not wait for the other.
constexpr int SUMS = 4;

template <class Numbers>
void normalize(const void* from, const void* weights, void* to, int64_t n, float eps) {
  typedef typename Numbers::Number Number;
  const Number *x = static_cast<const Number*>(from), *weight = static_cast<const Number*>(weights);
  Number* y = static_cast<Number*>(to);
  Floats sums[SUMS] = {zeros(), zeros(), zeros(), zeros()};
  int64_t i = 0;
  for (; i + SUMS * WIDTH <= n; i += SUMS * WIDTH) {
    for (int j = 0; j < SUMS; ++j) {
      const Floats v = Numbers::read(x + i + j * WIDTH);
      sums[j] = multiply_add(v, v, sums[j]);
    }
  }
  for (; i < n; i += WIDTH) {
    const Floats v = read_some<Numbers>(x + i, n - i);
    sums[0] = multiply_add(v, v, sums[0]);
  }
  const float total = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  const Floats factor = broadcast(1.0f / sqrtf(total / static_cast<float>(n) + eps));
  for (i = 0; i < n; i += WIDTH) {
    Floats v = Numbers::round(multiply(read_some<Numbers>(x + i, n - i), factor));
    if (weight != nullptr) v = multiply(v, read_some<Numbers>(weight + i, n - i));
    write_some<Numbers>(y + i, n - i, v);
  }
}

void rms(const void* x, const void* weight, void* y, int64_t n, int32_t dtype, float eps) {
  switch (dtype) {
    case FLOAT32: return normalize<NumbersFloat32>(x, weight, y, n, eps);
    case BFLOAT16: return normalize<NumbersBFloat16>(x, weight, y, n, eps);
    case FLOAT16: return normalize<NumbersFloat16>(x, weight, y, n, eps);
  }
}

}  // namespace

extern const NormFunctions EASYTORCH_NAME(norm);
const NormFunctions EASYTORCH_NAME(norm) = {rms};
