// The dtypes of numbers of one byte, as the kernels name them.
#pragma once

#include <stdint.h>

enum CodeKind : int32_t { NO_CODES = 0, CODES_INT8 = 1, CODES_E4M3FN = 2, CODES_E5M2 = 3 };
