// A cache of codes of one byte and their scales, checked.
#pragma once

#include "../cpu/code_kinds.h"
#include "../cpu/torch_abi.h"
#include "cpu_attention.h"

namespace easytorch {

inline int32_t codes_of(int32_t dtype) {
  return dtype == aoti_torch_dtype_int8()            ? CODES_INT8
         : dtype == aoti_torch_dtype_float8_e4m3fn() ? CODES_E4M3FN
         : dtype == aoti_torch_dtype_float8_e5m2()   ? CODES_E5M2
                                                     : NO_CODES;
}

// Adds the scales to a cache whose dimensions are (batch, first, second, D): those of the codes and of the scales, the last
// of which has one for each `group_size` codes. heads: which dimension counts them, 1 or 2.
inline void give_scales(DecodeCache& cache, const Tensor& codes, const Tensor& scale, int64_t group_size, int64_t heads) {
  const int64_t groups = group_size > 0 ? (codes.sizes[3] + group_size - 1) / group_size : -1;
  require(scale.dim == 4 && scale.dtype == aoti_torch_dtype_float32() && scale.sizes[0] == codes.sizes[0] &&
              scale.sizes[1] == codes.sizes[1] && scale.sizes[2] == codes.sizes[2] && scale.sizes[3] == groups &&
              (groups <= 1 || scale.strides[3] == 1),
          "attention: scales are of float32, one for each group of a key's codes");
  cache.scale = static_cast<const float*>(scale.data), cache.group_size = group_size;
  cache.scale_of_batch = scale.strides[0], cache.scale_of_head = scale.strides[heads];
  cache.scale_of_key = scale.strides[3 - heads];
}

}  // namespace easytorch
