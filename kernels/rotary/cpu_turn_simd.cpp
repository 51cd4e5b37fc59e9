#include "cpu_turn.h"

#include "../cpu/numbers.h"

namespace {

// a * b + c * d, every step rounded
template <class Numbers>
inline Floats turned(Floats a, Floats b, Floats c, Floats d) {
  return add(Numbers::round(multiply(a, b)), Numbers::round(multiply(c, d)));
}

template <class Numbers>
void turn(const void* from, const void* cosines, const void* sines, void* to, int64_t r, int64_t d) {
  typedef typename Numbers::Number Number;
  const int64_t half = r / 2;
  const Number *first = static_cast<const Number*>(from), *second = first + half;
  const Number *cos = static_cast<const Number*>(cosines), *sin = static_cast<const Number*>(sines);
  Number* y = static_cast<Number*>(to);
  for (int64_t i = 0; i < half; i += WIDTH) {
    const int64_t rest = half - i;
    const Floats low = read_some<Numbers>(first + i, rest), high = read_some<Numbers>(second + i, rest);
    const Floats back = multiply(high, broadcast(-1.0f));
    const Floats low_turned = turned<Numbers>(low, read_some<Numbers>(cos + i, rest), back,
                                              read_some<Numbers>(sin + i, rest));
    const Floats high_turned = turned<Numbers>(high, read_some<Numbers>(cos + half + i, rest), low,
                                               read_some<Numbers>(sin + half + i, rest));
    write_some<Numbers>(y + i, rest, low_turned);
    write_some<Numbers>(y + half + i, rest, high_turned);
  }
  if (d > r) memcpy(y + r, first + r, static_cast<size_t>(d - r) * sizeof(Number));
}

void halves(const void* x, const void* cos, const void* sin, void* y, int64_t r, int64_t d, int32_t dtype) {
  switch (dtype) {
    case FLOAT32: return turn<NumbersFloat32>(x, cos, sin, y, r, d);
    case BFLOAT16: return turn<NumbersBFloat16>(x, cos, sin, y, r, d);
    case FLOAT16: return turn<NumbersFloat16>(x, cos, sin, y, r, d);
  }
}

}  // namespace

extern const TurnFunctions EASYTORCH_NAME(turn);
const TurnFunctions EASYTORCH_NAME(turn) = {halves};
