// The instruction sets that *_simd.cpp sources are compiled for, and the best of them on this CPU.
#pragma once

#include <stdint.h>

namespace easytorch {

// 0: the compiler's baseline; 1: AVX2, FMA and F16C; 2: AVX-512 (F, BW, DQ, VL); 3: and AVX512_VNNI;
// 4: and AVX512_BF16.
inline int64_t best_level() {
#if defined(__x86_64__)
  static const int64_t level = [] {
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool bytes = avx512 && __builtin_cpu_supports("avx512vnni");
    return !avx2 ? 0 : !avx512 ? 1 : !bytes ? 2 : !__builtin_cpu_supports("avx512bf16") ? 3 : 4;
  }();
  return level;
#else
  return 0;
#endif
}

}  // namespace easytorch

// name_of(level): the functions of a *_simd.cpp source for that level, or for the best lower one that this CPU and the
// compiler support. A table that was not compiled is a weak symbol with a null address.
#define EASYTORCH_TABLE(Functions, name)                                                                               \
  extern const Functions easytorch_##name##_generic;                                                                   \
  extern const Functions easytorch_##name##_avx2 __attribute__((weak));                                                \
  extern const Functions easytorch_##name##_avx512 __attribute__((weak));                                              \
  extern const Functions easytorch_##name##_avx512_vnni __attribute__((weak));                                         \
  extern const Functions easytorch_##name##_avx512_bf16 __attribute__((weak));                                         \
  static const Functions& name##_of(int64_t level) {                                                                   \
    const Functions* const tables[] = {&easytorch_##name##_generic, &easytorch_##name##_avx2,                          \
                                       &easytorch_##name##_avx512, &easytorch_##name##_avx512_vnni,                    \
                                       &easytorch_##name##_avx512_bf16};                                               \
    for (level = level < easytorch::best_level() ? level : easytorch::best_level(); level > 0; --level) {              \
      if (tables[level] != nullptr) return *tables[level];                                                             \
    }                                                                                                                  \
    return *tables[0];                                                                                                 \
  }
