// Products of a few rows as tasks of a phase: blocks of the rows of several weights that share their input.
#pragma once

#include "../cpu/buffer.h"
#include "../cpu/levels.h"
#include "../cpu/phases.h"
#include "../linear/cpu_skinny.h"

EASYTORCH_TABLE(SkinnyFunctions, skinny)

namespace easytorch {

// Bytes of a weight that are one task. Another thread's blocks lie elsewhere, so what is prefetched beyond a block is read
// next.
constexpr int64_t BLOCK_BYTES = 1 << 16;

inline int64_t size_of(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

// (N, K) with a contiguous last dimension, and a bias (N,) or (0,) for none.
struct Projection {
  Projection(uint64_t weight, uint64_t bias) : weight(weight), bias(bias) {}
  Tensor weight, bias;

  int64_t rows() const { return weight.sizes[0]; }
  int64_t columns() const { return weight.sizes[1]; }
  int64_t block() const {
    const int64_t row = columns() * static_cast<int64_t>(aoti_torch_dtype_element_size(weight.dtype));
    return (BLOCK_BYTES / (row + 1) + 3) / 4 * 4 + (row > BLOCK_BYTES ? 4 : 0);
  }
  int64_t tasks() const { return (rows() + block() - 1) / block(); }
  bool fits(int64_t n, int64_t k, int32_t dtype) const {
    return weight.dim == 2 && bias.dim == 1 && rows() == n && columns() == k && k > 0 && weight.strides[1] == 1 &&
           weight.dtype == dtype && bias.dtype == dtype && (bias.sizes[0] == 0 || (bias.sizes[0] == n && bias.contiguous()));
  }
};

// Rows as a product takes them, for the threads of a region, each of which packs all rows: they are few, and nobody waits.
class PackedRows {
 public:
  PackedRows(const SkinnyFunctions& functions, int64_t rows, int64_t k, int32_t dtype, int64_t threads)
      : functions_(functions), packing_(functions.packing(dtype)), rows_(rows), k_(k), dtype_(dtype) {
    as_it_is_ = rows == 1 && packing_.dtype == dtype && k % packing_.step == 0;
    of_thread_ = rows * ((k + packing_.step - 1) / packing_.step) * packing_.step * size_of(packing_.dtype);
    of_thread_ = (of_thread_ + 63) / 64 * 64;
    if (!as_it_is_) packed_ = lines(threads * of_thread_);
  }

  // x: `rows` rows of K numbers one after another.
  const void* pack(const void* x, int64_t thread) const {
    if (as_it_is_) return x;
    char* const packed = packed_.get() + thread * of_thread_;
    for (int64_t row = 0; row < rows_; ++row) {
      functions_.pack(static_cast<const char*>(x) + row * k_ * size_of(dtype_), 1, dtype_, k_, rows_, packing_,
                      packed + row * packing_.step * size_of(packing_.dtype));
    }
    return packed;
  }

  SkinnyProduct product(const void* packed, const Projection& projection, void* y) const {
    return {packed, packing_.dtype, rows_, projection.rows(), k_, projection.weight.data, projection.weight.strides[0],
            dtype_, projection.bias.sizes[0] == 0 ? nullptr : projection.bias.data, dtype_, y, dtype_};
  }

 private:
  const SkinnyFunctions& functions_;
  const SkinnyPacking packing_;
  const int64_t rows_, k_;
  const int32_t dtype_;
  bool as_it_is_ = false;
  int64_t of_thread_ = 0;
  Buffer packed_;
};

}  // namespace easytorch
