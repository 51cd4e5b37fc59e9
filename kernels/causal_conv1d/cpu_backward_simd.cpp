// The gradients of causal convolution, from the last token to the first, with those of W tokens under way.
#include "cpu_convolution_backward.h"

#include "../cpu/functions.h"
#include "../cpu/rows.h"

namespace {

// Channels of a task: their taps and the tokens under way stay in the L1 cache.
constexpr int64_t CHANNELS = 8 * WIDTH;

ConvolutionGradientSizes sizes(const ConvolutionGradientCall* call) {
  // the gradients of the taps and the bias, and of the tokens under way
  return {CHANNELS, (2 * call->call.width + 1) * CHANNELS};
}

// The derivative of x * sigmoid(x).
inline Floats silu_slope(Floats x) {
  const Floats one = broadcast(1.0f), minus = broadcast(-1.0f);
  const Floats s = divide(one, add(one, exponential_of_any(multiply(x, minus))));
  return multiply(s, multiply_add(x, multiply_add(s, minus, one), one));
}

void run(const ConvolutionGradientCall* call, int64_t b, int64_t channel, float* scratch) {
  const ConvolutionGradientCall& g = *call;
  const ConvolutionCall& c = g.call;
  const int64_t count = c.channels - channel < CHANNELS ? c.channels - channel : CHANNELS, past = c.width - 1;
  const int64_t row = (c.channels + WIDTH - 1) / WIDTH * WIDTH;
  float *of_taps = scratch, *under_way = of_taps + (c.width + 1) * CHANNELS;
  memset(scratch, 0, static_cast<size_t>((2 * c.width + 1) * CHANNELS) * sizeof *scratch);
  const auto of_token = [&](int64_t t) { return under_way + (t + c.width) % c.width * CHANNELS; };
  const auto reach_at = [&](int64_t t) { return c.reach == nullptr ? past : c.reach[b * c.length + t]; };
  const auto token = [&](int64_t t, int64_t i) {  // a vector of its channels; those before the first are `past`
    if (t < 0) return load(c.past + (b * past + t + past) * row + channel + i);
    return read_vector(number_at(row_of(c.x, b, t, 0), channel + i, c.x.dtype), count - i, c.x.dtype);
  };
  const float* const of_final = g.final_grad == nullptr ? nullptr : g.final_grad + (b * c.channels + channel) * past;
  for (int64_t w = 0; of_final != nullptr && w < past; ++w) {
    const int64_t t = c.length - past + w;
    if (c.length - 1 - t > reach_at(c.length - 1)) continue;  // of another document than the last token's
    for (int64_t i = 0; i < count; ++i) of_token(t)[i] = of_final[i * past + w];
  }
  for (int64_t t = c.length - 1; t >= 0; --t) {
    const int64_t reach = reach_at(t);
    void* const to = number_at(g.grad_x, (b * c.length + t) * c.channels + channel, c.x.dtype);
    float* const own = of_token(t);
    for (int64_t i = 0; i < count; i += WIDTH) {
      const float* const taps = c.taps + channel + i;
      Floats grad = read_vector(number_at(row_of(g.grad, b, t, 0), channel + i, g.grad.dtype), count - i, g.grad.dtype);
      if (c.silu) {
        Floats y = load(taps + c.width * row);
        for (int64_t back = reach; back >= 0; --back) {
          y = multiply_add(token(t - back, i), load(taps + (past - back) * row), y);
        }
        grad = multiply(grad, silu_slope(y));
      }
      for (int64_t back = 0; back <= reach; ++back) {
        float *const of_x = of_token(t - back) + i, *const of_tap = of_taps + (past - back) * CHANNELS + i;
        store(of_x, multiply_add(grad, load(taps + (past - back) * row), load(of_x)));
        store(of_tap, multiply_add(grad, token(t - back, i), load(of_tap)));
      }
      float* const of_bias = of_taps + c.width * CHANNELS + i;
      store(of_bias, add(load(of_bias), grad));
      write_vector(number_at(to, i, c.x.dtype), count - i, c.x.dtype, load(own + i));
      store(own + i, zeros());
    }
  }
  for (int64_t w = 0; w < past; ++w) {
    float* const to = g.grad_initial + (b * c.channels + channel) * past + w;
    for (int64_t i = 0; i < count; ++i) to[i * past] = of_token(w - past)[i];
  }
  for (int64_t w = 0; w <= c.width; ++w) {
    memcpy(g.grad_taps + (b * (c.width + 1) + w) * c.channels + channel, of_taps + w * CHANNELS,
           static_cast<size_t>(count) * sizeof *of_taps);
  }
}

}  // namespace

extern const ConvolutionGradient EASYTORCH_NAME(convolution_gradient);
const ConvolutionGradient EASYTORCH_NAME(convolution_gradient) = {sizes, run};
