// Subnormal numbers taken for 0 while an object of this class lives, on the thread that made it.
//
// A product of decays passes through them on its way to 0, and a multiplication with one takes some 100 times as long: the
// scan of Mamba-2 took 4 times as long on tokens with strong decays (an Intel Xeon with AVX-512).
#pragma once

#include <stdint.h>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace easytorch {

class FlushSubnormals {
 public:
#if defined(__SSE2__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }  // results, and operands
  ~FlushSubnormals() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | (uint64_t{1} << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }
#else
  FlushSubnormals() {}
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__SSE2__)
  unsigned before_;
#elif defined(__aarch64__)
  uint64_t before_;
#endif
};

}  // namespace easytorch
