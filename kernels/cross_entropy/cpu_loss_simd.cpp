#include "cpu_loss.h"

#include <math.h>

#include "../cpu/functions.h"
#include "../cpu/numbers.h"

namespace {

// Terms that are summed in float32 before they are added in float64: a vocabulary has up to 256k.
constexpr int64_t BLOCK = 4096;

struct Softcap {
  explicit Softcap(float cap) : is(cap != 0.0f), cap(broadcast(cap)), one_over(broadcast(is ? 1.0f / cap : 0.0f)) {}
  Floats of(Floats x) const { return is ? multiply(cap, hyperbolic_tangent(multiply(x, one_over))) : x; }
  // The derivative at x: 1 - tanh^2.
  Floats slope(Floats x) const {
    const Floats t = hyperbolic_tangent(multiply(x, one_over));
    return multiply_add(multiply(t, broadcast(-1.0f)), t, broadcast(1.0f));
  }
  const bool is;
  const Floats cap, one_over;
};

// A vector of which `count` numbers are valid, and `rest` in the others.
inline Floats filled(Floats v, int64_t count, float rest) {
  if (count >= WIDTH) return v;
  float numbers[WIDTH];
  store(numbers, v);
  for (int64_t i = count; i < WIDTH; ++i) numbers[i] = rest;
  return load(numbers);
}

template <class Numbers>
float row_of(void* given, int64_t label, const float* upstream, const LossSettings& settings, float* terms) {
  typename Numbers::Number* const logits = static_cast<typename Numbers::Number*>(given);
  const int64_t n = settings.vocabulary;
  const Softcap softcap(settings.softcap);

  Floats tops = broadcast(-INFINITY);
  for (int64_t i = 0; i < n; i += WIDTH) {
    const Floats z = softcap.of(read_some<Numbers>(logits + i, n - i));
    store(terms + i, z);
    tops = maximum(tops, filled(z, n - i, -INFINITY));
  }
  const float found = largest(tops), chosen = terms[label];
  const float top = found == INFINITY || found == -INFINITY ? 0.0f : found;  // what the definition measures from

  const Floats minus_top = broadcast(-top);
  double total = 0.0, distances = 0.0;  // of exp(z - top) and, under smoothing, of z - top
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    const int64_t end = begin + BLOCK < n ? begin + BLOCK : n;
    Floats powers = zeros(), below = zeros();
    for (int64_t i = begin; i < end; i += WIDTH) {
      const Floats distance = filled(add(load(terms + i), minus_top), end - i, 0.0f);
      const Floats power = filled(exponential_of_any(distance), end - i, 0.0f);
      store(terms + i, power);
      powers = add(powers, power), below = add(below, distance);
    }
    total += sum(powers), distances += sum(below);
  }

  const double logarithm = log(total), lse = static_cast<double>(top) + logarithm, smoothing = settings.smoothing;
  // each term above the largest logit: the logarithm of a sum beside a logit of 1e6 would be rounded away
  double loss = logarithm - (1.0 - smoothing) * (static_cast<double>(chosen) - top);
  if (smoothing != 0.0) loss -= smoothing * (distances / static_cast<double>(n));
  if (settings.z_loss != 0.0f) loss += settings.z_loss * lse * lse;
  if (upstream == nullptr) return static_cast<float>(loss);

  const double slope_of_lse = settings.z_loss != 0.0f ? 1.0 + 2.0 * settings.z_loss * lse : 1.0;
  const double factor = *upstream * slope_of_lse / total, share = -*upstream * smoothing / static_cast<double>(n);
  double of_label = terms[label] * factor + share + *upstream * (smoothing - 1.0);
  if (softcap.is) of_label *= 1.0 - pow(static_cast<double>(chosen) / settings.softcap, 2.0);
  for (int64_t i = 0; i < n; i += WIDTH) {
    Floats gradient = multiply_add(load(terms + i), broadcast(static_cast<float>(factor)), broadcast(static_cast<float>(share)));
    if (softcap.is) gradient = multiply(gradient, softcap.slope(read_some<Numbers>(logits + i, n - i)));
    write_some<Numbers>(logits + i, n - i, gradient);
  }
  store_number(logits, label, settings.dtype, static_cast<float>(of_label));
  return static_cast<float>(loss);
}

float row(void* logits, int64_t label, const float* upstream, const LossSettings* settings, float* buffer) {
  switch (settings->dtype) {
    case BFLOAT16: return row_of<NumbersBFloat16>(logits, label, upstream, *settings, buffer);
    case FLOAT16: return row_of<NumbersFloat16>(logits, label, upstream, *settings, buffer);
    default: return row_of<NumbersFloat32>(logits, label, upstream, *settings, buffer);
  }
}

}  // namespace

extern const LossFunctions EASYTORCH_NAME(loss);
const LossFunctions EASYTORCH_NAME(loss) = {row};
