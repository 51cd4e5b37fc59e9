#include "cpu_convolution.h"

#include "../cpu/functions.h"
#include "../cpu/rows.h"

namespace {

int64_t row_numbers(const ConvolutionCall* call) { return (call->channels + WIDTH - 1) / WIDTH * WIDTH; }

void prepare(const ConvolutionCall* call) {
  const ConvolutionCall& c = *call;
  const int64_t row = row_numbers(call);
  for (int64_t w = 0; w < c.width; ++w) {
    float* taps = c.taps + w * row;
    for (int64_t i = 0; i < c.channels; ++i) {
      taps[i] = load_number(c.weight.data, i * c.weight.of_token + w * c.weight.of_head, c.weight.dtype);
    }
    for (int64_t i = c.channels; i < row; ++i) taps[i] = 0.0f;
  }
  float* bias = c.taps + c.width * row;
  if (c.bias.data == nullptr) {
    memset(bias, 0, static_cast<size_t>(row) * sizeof *bias);
  } else {
    read_row(c.bias.data, c.channels, c.bias.dtype, bias);
  }
  memset(c.past, 0, static_cast<size_t>(c.batch * (c.width - 1) * row) * sizeof *c.past);
  for (int64_t b = 0; c.initial != nullptr && b < c.batch; ++b) {
    for (int64_t i = 0; i < c.channels; ++i) {
      for (int64_t w = 0; w + 1 < c.width; ++w) {
        c.past[(b * (c.width - 1) + w) * row + i] = c.initial[(b * c.channels + i) * (c.width - 1) + w];
      }
    }
  }
}

// A vector of the channels of token t, which is one of the past where it is below 0.
inline Floats token(const ConvolutionCall& c, int64_t b, int64_t t, int64_t channel, int64_t left, int64_t row) {
  if (t < 0) return load(c.past + (b * (c.width - 1) + t + c.width - 1) * row + channel);
  return read_vector(number_at(row_of(c.x, b, t, 0), channel, c.x.dtype), left, c.x.dtype);
}

void run(const ConvolutionCall* call, int64_t b, int64_t first, int64_t end) {
  const ConvolutionCall& c = *call;
  const int64_t row = row_numbers(call);
  for (int64_t t = first; t < end; ++t) {
    const int64_t reach = c.reach == nullptr ? c.width - 1 : c.reach[b * c.length + t];
    void* to = number_at(c.output, (b * c.length + t) * c.channels, c.x.dtype);
    for (int64_t i = 0; i < c.channels; i += WIDTH) {
      const int64_t left = c.channels - i;
      const float* taps = c.taps + i;
      Floats y = load(taps + c.width * row);
      for (int64_t back = reach; back >= 0; --back) {
        y = multiply_add(token(c, b, t - back, i, left, row), load(taps + (c.width - 1 - back) * row), y);
      }
      write_vector(number_at(to, i, c.x.dtype), left, c.x.dtype, c.silu ? silu(y) : y);
    }
  }
}

void keep(const ConvolutionCall* call, int64_t b) {
  const ConvolutionCall& c = *call;
  const int64_t row = row_numbers(call), kept = c.width - 1;
  const int64_t reach = c.reach == nullptr ? kept : c.reach[b * c.length + c.length - 1];
  for (int64_t w = 0; w < kept; ++w) {
    const int64_t t = c.length - kept + w;  // the last token reads `reach` others: those are of its document
    float numbers[WIDTH];
    for (int64_t i = 0; i < c.channels; i += WIDTH) {
      const bool seen = c.length - 1 - t <= reach;
      store(numbers, seen ? token(c, b, t, i, c.channels - i, row) : zeros());
      for (int64_t n = 0; n < WIDTH && i + n < c.channels; ++n) {
        c.final[(b * c.channels + i + n) * kept + w] = numbers[n];
      }
    }
  }
}

}  // namespace

extern const ConvolutionFunctions EASYTORCH_NAME(convolution);
const ConvolutionFunctions EASYTORCH_NAME(convolution) = {row_numbers, prepare, run, keep};
