// Stacks of the experts' weights, and one expert's part of them.
#pragma once

#include "../decoder_step/cpu_products.h"
#include "cpu_experts.h"

namespace easytorch {

// One of a stack of tensors, without a copy: what `Codes` reads of a tensor.
struct Part {
  Part(const Tensor& stack, int64_t index)
      : data(static_cast<char*>(stack.data) +
             index * stack.strides[0] * static_cast<int64_t>(aoti_torch_dtype_element_size(stack.dtype))),
        dim(stack.dim - 1), sizes(stack.sizes + 1), strides(stack.strides + 1), dtype(stack.dtype) {}
  int64_t numel() const { return numel_of(dim, sizes); }
  bool contiguous() const { return contiguous_of(dim, sizes, strides); }

  void* data;
  int64_t dim;
  const int64_t *sizes, *strides;
  int32_t dtype;
};

// (E, N, K) with a contiguous last dimension, or stored as (E, K, N), or the fields of a QuantizedWeight for each expert, and biases (E, N) or (0,)
// for none; given as a projection is.
struct Stack {
  explicit Stack(const uint64_t* stack)
      : weight(stack[0]), bias(stack[1]), scale(stack[2]), zero(stack[3]), format(static_cast<int64_t>(stack[4])),
        columns_(static_cast<int64_t>(stack[5])), group_size(static_cast<int64_t>(stack[6])) {
    require(weight.dim == 3, "experts_step takes stacks of weights");
    if (format != Projection::DENSE && weight.sizes[0] > 0) rows_ = codes(0).n;
  }

  Codes codes(int64_t expert) const {
    require(scale.dim == 3 && scale.sizes[0] == weight.sizes[0] &&
                (zero.numel() == 0 || (zero.dim == 3 && zero.sizes[0] == weight.sizes[0])),
            "experts_step: the scales do not fit");
    const Part data(weight, expert), scales(scale, expert);
    return zero.numel() == 0 ? Codes(data, scales, zero, format, columns_, group_size)
                             : Codes(data, scales, Part(zero, expert), format, columns_, group_size);
  }
  bool dense() const { return format == Projection::DENSE; }
  // Whether an expert's numbers lie as (K, N).
  bool by_columns() const {
    return dense() && weight.sizes[2] > 1 && weight.strides[2] != 1 && (weight.sizes[1] == 1 || weight.strides[1] == 1);
  }
  int64_t experts() const { return weight.sizes[0]; }
  int64_t rows() const { return dense() ? weight.sizes[1] : rows_; }
  int64_t columns() const { return dense() ? weight.sizes[2] : columns_; }
  const char* of(int64_t expert) const { return static_cast<const char*>(weight.data) + expert * weight.strides[0] * size_of(element_of(weight.dtype)); }
  const char* bias_of(int64_t expert) const {
    return bias.dim == 1 ? nullptr : static_cast<const char*>(bias.data) + expert * bias.strides[0] * size_of(element_of(bias.dtype));
  }
  // Rows that are a task: of about BLOCK_BYTES.
  int64_t block() const {
    if (by_columns()) return COLUMNS_OF_TASK;
    const int64_t row = weight.sizes[2] * static_cast<int64_t>(aoti_torch_dtype_element_size(weight.dtype));
    const int64_t rows = BLOCK_BYTES / (row + 1) / 4 * 4;
    return rows < 4 ? 4 : rows;
  }
  bool fits(int64_t experts, int64_t n, int64_t k, int32_t dtype) const {
    const bool biased = bias.dim == 2 && bias.sizes[0] == experts && bias.sizes[1] == n && (n == 1 || bias.strides[1] == 1);
    return weight.sizes[0] == experts && rows() == n && columns() == k && k > 0 && n > 0 && bias.dtype == dtype &&
           (biased || (bias.dim == 1 && bias.sizes[0] == 0)) &&
           (!dense() || (weight.dtype == dtype && (k == 1 || weight.strides[2] == 1 || by_columns())));
  }

  const Tensor weight, bias, scale, zero;
  const int64_t format;

 private:
  const int64_t columns_, group_size;
  int64_t rows_ = 0;
};

}  // namespace easytorch
