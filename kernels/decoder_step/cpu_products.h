// Products of a few rows as tasks of a phase: blocks of the rows of several weights that share their input.
#pragma once

#include <memory>

#include "../cpu/buffer.h"
#include "../cpu/phases.h"
#include "../quantized_matmul/cpu_rows.h"

namespace easytorch {

// Bytes of a weight that are one task. Another thread's blocks lie elsewhere, so what is prefetched beyond a block is read
// next.
constexpr int64_t BLOCK_BYTES = 1 << 16;

inline int64_t size_of(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

// (N, K) with a contiguous last dimension, or the fields of a QuantizedWeight, and a bias (N,) or (0,) for none.
struct Projection {
  // What an operator is given of one, in its schema's words: `PROJECTION(name)`.
  static constexpr int64_t FIELDS = 7;
  static constexpr int64_t DENSE = -1;

  template <class Reader>
  explicit Projection(Reader& from) : weight(from.tensor()), bias(from.tensor()) {
    if constexpr (Reader::ALL_FIELDS) {
      const Tensor scale(from.tensor()), zero(from.tensor());
      const int64_t format = from.integer();
      decode(scale, zero, format, from);
    } else if (const int64_t format = from.integer(); format != DENSE) {
      const Tensor scale(from.tensor()), zero(from.tensor());
      decode(scale, zero, format, from);
    }
  }

  Tensor weight, bias;
  std::unique_ptr<Codes> codes;  // of a quantized weight

  int64_t rows() const { return codes ? codes->n : weight.sizes[0]; }
  int64_t columns() const { return codes ? codes->k : weight.sizes[1]; }
  int64_t block() const {
    const int64_t width = codes ? codes->stored : weight.sizes[1], unit = codes && codes->interleaved ? codes->unit() : 4;
    const int64_t row = width * static_cast<int64_t>(aoti_torch_dtype_element_size(weight.dtype));
    return (BLOCK_BYTES / (row + 1) + unit - 1) / unit * unit + (row > BLOCK_BYTES ? unit : 0);
  }
  int64_t tasks() const { return (rows() + block() - 1) / block(); }
  bool fits(int64_t n, int64_t k, int32_t dtype) const {
    return weight.dim == 2 && bias.dim == 1 && rows() == n && columns() == k && k > 0 &&
           (codes || (weight.strides[1] == 1 && weight.dtype == dtype)) && bias.dtype == dtype &&
           (bias.sizes[0] == 0 || (bias.sizes[0] == n && bias.contiguous()));
  }

 private:
  template <class Reader>
  void decode(const Tensor& scale, const Tensor& zero, int64_t format, Reader& from) {
    const int64_t columns = from.integer(), group = from.integer();
    if (format != DENSE) codes = std::make_unique<Codes>(weight, scale, zero, format, columns, group);
  }
};
#define PROJECTION(name)                                                                                             \
  "Tensor " name ", Tensor " name "_bias, Tensor " name "_scale, Tensor " name "_zero, int " name "_format, int " name \
  "_columns, int " name "_group"

// The product of packed rows with a projection.
struct Product {
  SkinnyProduct dense;
  QuantizedProduct quantized;
  const QuantizedRows* rows;  // of a quantized weight
  QuantizedRows::Way way;
  const SkinnyFunctions* functions;

  char* y() const { return static_cast<char*>(rows == nullptr ? dense.y : quantized.y); }
  // Its columns [begin, end).
  void run(int64_t begin, int64_t end) const {
    rows == nullptr ? functions->run(&dense, begin, end) : rows->run(way, quantized, begin, end);
  }
};

// Rows as the products of some projections take them, for the threads of a region, each of which packs all rows: they are
// few, and nobody waits.
class PackedRows {
 public:
  static constexpr int MOST = 3;
  // The rows of one thread, for each projection.
  struct Packed {
    const void* at[MOST];
    QuantizedRows::Way way[MOST];
  };

  // k: the columns of every projection.
  PackedRows(int64_t level, int64_t rows, int64_t k, int32_t dtype, int64_t threads,
             std::initializer_list<const Projection*> projections)
      : functions_(skinny_of(level)), packing_(functions_.packing(dtype)), rows_(rows), k_(k), dtype_(dtype) {
    as_it_is_ = rows == 1 && packing_.dtype == dtype && k % packing_.step == 0;
    for (const Projection* projection : projections) add(*projection, level);
    if (of_thread_ > 0) packed_ = lines(threads * of_thread_);
  }

  // x: `rows` rows of K numbers one after another.
  Packed pack(const void* x, int64_t thread) const {
    Packed packed{};
    char* const own = packed_.get() + thread * of_thread_;
    const auto row = [&](int64_t i) { return static_cast<const char*>(x) + i * k_ * size_of(dtype_); };
    for (int user = 0; user < users_; ++user) {
      const int like = like_[user];
      packed.at[user] = like < user ? packed.at[like] : own + place_[user];
      if (like < user) {
        packed.way[user] = packed.way[like];
      } else if (quantized_[user]) {
        packed.way[user] = quantized_[user]->pack(row, 1, own + place_[user]);
      } else if (as_it_is_) {
        packed.at[user] = x;
      } else {
        for (int64_t i = 0; i < rows_; ++i) {
          functions_.pack(row(i), 1, dtype_, k_, rows_, packing_,
                          own + place_[user] + i * packing_.step * size_of(packing_.dtype));
        }
      }
    }
    return packed;
  }

  // With the projection that was given as number `user`.
  Product product(const Packed& packed, int user, void* y) const {
    const Projection& projection = *projections_[user];
    const void* const bias = projection.bias.sizes[0] == 0 ? nullptr : projection.bias.data;
    Product made{};
    made.functions = &functions_, made.rows = quantized_[user].get(), made.way = packed.way[user];
    if (made.rows != nullptr) {
      made.quantized = projection.codes->product(packed.at[user], rows_, dtype_, bias, dtype_, y);
    } else {
      made.dense = {packed.at[user], packing_.dtype, rows_, projection.rows(), k_, projection.weight.data,
                    projection.weight.strides[0], dtype_, bias, dtype_, y, dtype_};
    }
    return made;
  }

 private:
  void add(const Projection& projection, int64_t level) {
    const int user = users_++;
    require(user < MOST, "a step: too many projections of one input");
    projections_[user] = &projection;
    if (projection.codes) quantized_[user] = std::make_unique<QuantizedRows>(*projection.codes, rows_, dtype_, level);
    for (int other = 0; other < user; ++other) {
      const bool both = quantized_[other] && quantized_[user];
      if (both ? quantized_[user]->packs_like(*quantized_[other]) : !quantized_[other] && !quantized_[user]) {
        like_[user] = other;
        return;
      }
    }
    like_[user] = user, place_[user] = of_thread_;
    const int64_t dense = as_it_is_ ? 0 : rows_ * ((k_ + packing_.step - 1) / packing_.step) * packing_.step * size_of(packing_.dtype);
    of_thread_ += ((quantized_[user] ? quantized_[user]->bytes() : dense) + 63) / 64 * 64;
  }

  const SkinnyFunctions& functions_;
  const SkinnyPacking packing_;
  const int64_t rows_, k_;
  const int32_t dtype_;
  bool as_it_is_ = false;
  int users_ = 0, like_[MOST] = {};
  const Projection* projections_[MOST] = {};
  std::unique_ptr<QuantizedRows> quantized_[MOST];
  int64_t place_[MOST] = {}, of_thread_ = 0;
  Buffer packed_;
};

}  // namespace easytorch
