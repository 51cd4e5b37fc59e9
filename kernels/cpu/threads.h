// How many threads torch's loops have.
#pragma once

#include <stdint.h>

extern "C" __attribute__((weak)) int omp_get_max_threads();

namespace easytorch {

// Without OpenMP nothing says it: as many as large CPUs have.
inline int64_t most_threads() { return omp_get_max_threads == nullptr ? 64 : omp_get_max_threads(); }

}  // namespace easytorch
