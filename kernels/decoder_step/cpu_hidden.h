// What both halves of a layer share: hidden states, normalized rows for products, and the last product with its residual.
#pragma once

#include "../rms_norm/cpu_norm.h"
#include "cpu_products.h"
#include "cpu_step.h"

EASYTORCH_TABLE(NormFunctions, norm)
EASYTORCH_TABLE(StepFunctions, step)

namespace easytorch {
namespace {

// How an operator runs: by so many threads, with the instructions of a level.
struct Run {
  template <class Reader>
  explicit Run(Reader& from) : threads(from.integer()), level(from.integer()) {}
  Run(uint64_t threads, uint64_t level) : threads(static_cast<int64_t>(threads)), level(static_cast<int64_t>(level)) {}
  int64_t threads, level;
};

// x (B, 1, D), contiguous: hidden states.
struct Hidden {
  explicit Hidden(const Tensor& x) : data(static_cast<const char*>(x.data)), dtype(element_of(x.dtype)) {
    require(x.dim == 3 && x.sizes[1] == 1 && x.contiguous(), "a step takes hidden states (B, 1, D), contiguous");
    require(dtype >= 0, "a step takes float32, bfloat16 or float16");
    rows = x.sizes[0], width = x.sizes[2];
    require(rows > 0 && width > 0, "a step takes a row at least");
  }
  const char* row(int64_t m) const { return data + m * width * size_of(dtype); }
  const char* data;
  int32_t dtype;
  int64_t rows, width;
};

// (N,) or, for none, (0,).
const void* weight_of(const Tensor& weight, int64_t n, const Tensor& x) {
  require(weight.dim == 1 && (weight.sizes[0] == 0 || weight.sizes[0] == n) && weight.contiguous() &&
              weight.dtype == x.dtype,
          "a step: the weight of a norm does not fit");
  return weight.sizes[0] == 0 ? nullptr : weight.data;
}

// Normalized rows, packed for a product; each thread has its own.
class NormalizedRows {
 public:
  NormalizedRows(const Hidden& x, const void* weight, double eps, int64_t level, int64_t threads,
                 std::initializer_list<const Projection*> projections)
      : x_(x), weight_(weight), eps_(static_cast<float>(eps)), norm_(norm_of(level)),
        packed(level, x.rows, x.width, x.dtype, threads, projections), of_thread_(x.rows * x.width * size_of(x.dtype)),
        rows_(lines(threads * of_thread_)) {}

  PackedRows::Packed make(int64_t thread) const {
    char* const rows = rows_.get() + thread * of_thread_;
    const int64_t row = x_.width * size_of(x_.dtype);
    for (int64_t m = 0; m < x_.rows; ++m) norm_.rms(x_.row(m), weight_, rows + m * row, x_.width, x_.dtype, eps_);
    return packed.pack(rows, thread);
  }

 private:
  const Hidden& x_;
  const void* weight_;
  const float eps_;
  const NormFunctions& norm_;

 public:
  const PackedRows packed;

 private:
  const int64_t of_thread_;
  const Buffer rows_;
};

// Rows [begin, end) of the nth block of a projection.
struct Block {
  Block(const Projection& projection, int64_t task) : begin(task * projection.block()), end(begin + projection.block()) {
    end = end < projection.rows() ? end : projection.rows();
  }
  int64_t begin, end;
};

// The last product of a half: its rows, with x added.
void add_residual(const StepFunctions& step, const Product& product, const Hidden& x, const Projection& projection,
                  int64_t task) {
  const Block block(projection, task);
  product.run(block.begin, block.end);
  const int64_t size = size_of(x.dtype);
  for (int64_t m = 0; m < x.rows; ++m) {
    step.add(x.row(m) + block.begin * size, product.y() + (m * x.width + block.begin) * size,
             block.end - block.begin, x.dtype);
  }
}

}  // namespace
}  // namespace easytorch
