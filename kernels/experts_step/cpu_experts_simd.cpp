#include "cpu_experts.h"

#include "../cpu/functions.h"
#include "../cpu/numbers.h"

namespace {

template <class Numbers>
void clamped_row(const void* from, void* to, int64_t n, float alpha, float limit) {
  typedef typename Numbers::Number Number;
  const Number* pairs = static_cast<const Number*>(from);
  Number* y = static_cast<Number*>(to);
  float gate[WIDTH] = {}, up[WIDTH] = {};
  const auto rounded_to = [](Floats x) { return Numbers::round(x); };
  for (int64_t i = 0; i < n; i += WIDTH) {
    const int64_t count = n - i < WIDTH ? n - i : WIDTH;
    for (int64_t j = 0; j < count; ++j) {
      gate[j] = load_number(pairs, 2 * (i + j), Numbers::DTYPE);
      up[j] = load_number(pairs, 2 * (i + j) + 1, Numbers::DTYPE);
    }
    // in this order NaN stays
    const Floats most = broadcast(limit), least = broadcast(-limit);
    const Floats g = minimum(most, load(gate)), u = maximum(least, minimum(most, load(up)));
    const Floats active = rounded_to(times_sigmoid(g, rounded_to(multiply(g, broadcast(alpha)))));
    write_some<Numbers>(y + i, count, multiply(rounded_to(add(u, broadcast(1.0f))), active));
  }
}

void clamped(const void* pairs, void* y, int64_t n, int32_t dtype, float alpha, float limit) {
  switch (dtype) {
    case FLOAT32: return clamped_row<NumbersFloat32>(pairs, y, n, alpha, limit);
    case BFLOAT16: return clamped_row<NumbersBFloat16>(pairs, y, n, alpha, limit);
    case FLOAT16: return clamped_row<NumbersFloat16>(pairs, y, n, alpha, limit);
  }
}

template <class Numbers>
void weighted_rows(const void* data, int64_t stride, const int64_t* rows, const float* weights, int64_t k, void* to,
                   int64_t n) {
  typedef typename Numbers::Number Number;
  for (int64_t i = 0; i < n; i += WIDTH) {
    Floats sum = zeros();
    for (int64_t j = 0; j < k; ++j) {
      if (rows[j] < 0) continue;
      const Number* row = static_cast<const Number*>(data) + rows[j] * stride;
      sum = multiply_add(broadcast(weights[j]), read_some<Numbers>(row + i, n - i), sum);
    }
    write_some<Numbers>(static_cast<Number*>(to) + i, n - i, sum);
  }
}

void weighted(const void* data, int64_t stride, const int64_t* rows, const float* weights, int64_t k, void* y, int64_t n,
              int32_t dtype) {
  switch (dtype) {
    case FLOAT32: return weighted_rows<NumbersFloat32>(data, stride, rows, weights, k, y, n);
    case BFLOAT16: return weighted_rows<NumbersBFloat16>(data, stride, rows, weights, k, y, n);
    case FLOAT16: return weighted_rows<NumbersFloat16>(data, stride, rows, weights, k, y, n);
  }
}

}  // namespace

extern const ExpertsFunctions EASYTORCH_NAME(experts);
const ExpertsFunctions EASYTORCH_NAME(experts) = {clamped, weighted};
