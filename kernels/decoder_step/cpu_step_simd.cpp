#include "cpu_step.h"

#include "../cpu/numbers.h"

namespace {

template <class Numbers>
void add_row(const void* from, void* to, int64_t n) {
  typedef typename Numbers::Number Number;
  const Number* x = static_cast<const Number*>(from);
  Number* y = static_cast<Number*>(to);
  for (int64_t i = 0; i < n; i += WIDTH) {
    write_some<Numbers>(y + i, n - i, add(read_some<Numbers>(x + i, n - i), read_some<Numbers>(y + i, n - i)));
  }
}

void add_some(const void* x, void* y, int64_t n, int32_t dtype) {
  switch (dtype) {
    case FLOAT32: return add_row<NumbersFloat32>(x, y, n);
    case BFLOAT16: return add_row<NumbersBFloat16>(x, y, n);
    case FLOAT16: return add_row<NumbersFloat16>(x, y, n);
  }
}

}  // namespace

extern const StepFunctions EASYTORCH_NAME(step);
const StepFunctions EASYTORCH_NAME(step) = {add_some};
