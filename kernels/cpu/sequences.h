// Checks the tensors that the operators of recurrences receive.
#pragma once

#include "strided.h"
#include "torch_abi.h"

namespace easytorch {

// A tensor of shape (0,) stands for an absent one.
inline bool absent(const Tensor& tensor) { return tensor.dim == 1 && tensor.sizes[0] == 0; }

// (B, T, heads, width), or (B, T, width) where heads is 0; null if absent.
inline Strided sequence_of(const Tensor& tensor, int64_t batch, int64_t length, int64_t heads, int64_t numbers,
                           const char* message) {
  if (absent(tensor)) return {nullptr, 0, 0, 0, 0};
  const int64_t dim = heads == 0 ? 3 : 4;
  require(tensor.dim == dim && tensor.sizes[0] == batch && tensor.sizes[1] == length && tensor.sizes[dim - 1] == numbers &&
              (heads == 0 || tensor.sizes[2] == heads) && element_of(tensor.dtype) >= 0 &&
              (numbers <= 1 || tensor.strides[dim - 1] == 1),
          message);
  return {tensor.data, element_of(tensor.dtype), tensor.strides[0], tensor.strides[1], heads == 0 ? 0 : tensor.strides[2]};
}

// (N,) or (rows, N), contiguous; null if absent. of_head: the stride of rows, of_token: of elements.
inline Strided vector_of(const Tensor& tensor, int64_t numbers, const char* message) {
  if (absent(tensor)) return {nullptr, 0, 0, 0, 0};
  require(tensor.dim == 1 && tensor.sizes[0] == numbers && tensor.contiguous() && element_of(tensor.dtype) >= 0, message);
  return {tensor.data, element_of(tensor.dtype), 0, 0, 1};
}

inline Documents documents_of(const Tensor& tensor, int64_t batch, int64_t length, const char* message) {
  if (absent(tensor)) return {nullptr, 0, 0};
  require(tensor.dim == 2 && tensor.sizes[0] == batch && tensor.sizes[1] == length &&
              tensor.dtype == aoti_torch_dtype_int64(),
          message);
  return {static_cast<const int64_t*>(tensor.data), tensor.strides[0], tensor.strides[1]};
}

// A state in float32, contiguous; null if absent.
inline const float* state_of(const Tensor& tensor, int64_t dim, const int64_t* sizes, const char* message) {
  if (absent(tensor)) return nullptr;
  require(tensor.dim == dim && tensor.dtype == aoti_torch_dtype_float32(), message);
  bool empty = false;
  for (int64_t d = 0; d < dim; ++d) {
    require(tensor.sizes[d] == sizes[d], message);
    empty = empty || sizes[d] == 0;
  }
  require(empty || tensor.contiguous(), message);  // an empty one has any strides
  return static_cast<const float*>(tensor.data);
}

}  // namespace easytorch
