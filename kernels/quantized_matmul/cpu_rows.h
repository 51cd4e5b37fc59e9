// A few rows times a quantized weight, in the fastest of the ways that take them: for the operators that multiply by one.
#pragma once

#include "../cpu/buffer.h"
#include "../cpu/levels.h"
#include "../cpu/torch_abi.h"
#include "../linear/cpu_skinny_table.h"
#include "cpu_interleaved.h"
#include "cpu_product.h"

EASYTORCH_TABLE(QuantizedFunctions, quantized)
EASYTORCH_TABLE(CodesFunctions, bfloat16_codes)
EASYTORCH_TABLE(CodesFunctions, integer_codes)
EASYTORCH_TABLE(CodesFunctions, interleaved_codes)

namespace easytorch {

// Bytes of a row of k columns, or -1 where llama.cpp's blocks do not divide it.
inline int64_t stored_bytes(int64_t format, int64_t k) {
  const bool of_32 = format < Q4_K || (format >= Q4_1 && format <= IQ4_NL);
  const int64_t columns = of_32 ? 32 : 256;
  const auto blocks = [&](int64_t bytes) { return k % columns == 0 ? k / columns * bytes : -1; };
  switch (format) {
    case Q4_1: return blocks(20);
    case Q5_0: return blocks(22);
    case Q5_1: return blocks(24);
    case IQ4_NL: return blocks(18);
    case Q2_K: return blocks(84);
    case Q3_K: return blocks(110);
    case Q5_K: return blocks(176);
    case IQ4_XS: return blocks(136);
    case INT4:
    case FP4_E2M1:
    case NF4: return (k + 1) / 2;
    case Q8_0: return k % columns == 0 ? k / columns * 34 : -1;
    case Q4_0: return k % columns == 0 ? k / columns * 18 : -1;
    case Q4_K: return k % columns == 0 ? k / columns * 144 : -1;
    case Q6_K: return k % columns == 0 ? k / columns * 210 : -1;
    default: return k;
  }
}

// Whether 16 rows of the format may be interleaved: they are blocks of 32 columns or more.
inline bool interleaves(int64_t format, int64_t k) {
  return interleaved_blocks(format).block > 0 && k % 32 == 0 && stored_bytes(format, k) > 0;
}

// The tensors of a QuantizedWeight (N, K), or parts of some, checked. Scales may be given as the bits of float32.
class Codes {
 public:
  template <class Data, class Zero>
  Codes(const Data& data, const Data& scale, const Zero& zero, int64_t format, int64_t columns, int64_t group_size)
      : format(format), k(columns) {
    require(format >= INT8 && format <= IQ4_XS, "quantized_matmul: unknown format");
    require(data.dim == 2 && scale.dim == 2, "quantized_matmul: wrong dimensions");
    require(k > 0 && group_size > 0, "quantized_matmul: x and weight do not fit");
    n = data.sizes[0], stored = stored_bytes(format, k);
    const int64_t of_row = (k + group_size - 1) / group_size;
    interleaved = stored > 0 && data.sizes[1] == INTERLEAVED_ROWS * stored && interleaves(format, k);
    if (interleaved) n *= INTERLEAVED_ROWS;
    require((interleaved || data.sizes[1] == stored) && (data.sizes[1] == 1 || data.strides[1] == 1),
            "quantized_matmul: the codes do not fit");
    require(aoti_torch_dtype_element_size(data.dtype) == 1, "quantized_matmul: codes of a byte are needed");
    const bool one = scale.sizes[0] == 1 && scale.sizes[1] == 1;
    require(one || (format < Q8_0 && scale.sizes[0] == n && scale.sizes[1] == of_row),
            "quantized_matmul: the scales do not fit");
    require(scale.contiguous() && (scale.dtype == aoti_torch_dtype_float32() || scale.dtype == aoti_torch_dtype_int32()),
            "quantized_matmul: scales in float32, dense");
    const bool zeros = zero.numel() != 0;
    require(!zeros || (format == INT4 && zero.dim == 2 && zero.sizes[0] == scale.sizes[0] &&
                       zero.sizes[1] == scale.sizes[1] && zero.contiguous() && zero.dtype == aoti_torch_dtype_uint8()),
            "quantized_matmul: the zeros do not fit");
    product_.n = n, product_.k = k, product_.format = format, product_.data = static_cast<const uint8_t*>(data.data);
    require(!interleaved || n == 0 || data.sizes[0] == 1 || data.strides[0] == data.sizes[1],
            "quantized_matmul: interleaved rows lie one after another");
    product_.row_bytes = n == 0 || interleaved ? stored : data.strides[0], product_.scale = static_cast<const float*>(scale.data);
    product_.zero = zeros ? static_cast<const uint8_t*>(zero.data) : nullptr;
    product_.groups = one ? 1 : of_row, product_.scale_stride = one ? 0 : of_row;
    product_.group_size = one ? k : group_size;
  }

  QuantizedProduct product(const void* x, int64_t m, int32_t dtype, const void* bias, int32_t bias_dtype, void* y) const {
    QuantizedProduct made = product_;
    made.x = x, made.m = m, made.x_dtype = made.y_dtype = dtype, made.bias = bias, made.bias_dtype = bias_dtype, made.y = y;
    return made;
  }
  // Rows of the weight that are computed together.
  int64_t unit() const { return interleaved ? INTERLEAVED_ROWS : 1; }
  int64_t groups() const { return product_.groups; }
  int64_t group_size() const { return product_.group_size; }

  int64_t format, n, k, stored;
  bool interleaved;

 private:
  QuantizedProduct product_{};
};

// How M rows of x are multiplied by the rows of one weight.
class QuantizedRows {
 public:
  enum Way { INTERLEAVED, OF_INTEGERS, OF_BFLOAT16, DECODED, IN_FLOAT32 };

  QuantizedRows(const Codes& codes, int64_t m, int32_t dtype, int64_t level)
      : functions_(quantized_of(level)), bfloat16_(bfloat16_codes_of(level)), integers_(integer_codes_of(level)),
        interleaved_(interleaved_codes_of(level)), skinny_(skinny_of(level)), separate_(codes.interleaved), format_(codes.format), m_(m), k_(codes.k), dtype_(dtype) {
    const int64_t groups = codes.groups(), group_size = codes.group_size(), step = functions_.step();
    require(groups == 1 || group_size % step == 0, "quantized_matmul: groups of a multiple of 32 columns");
    packing_ = skinny_.packing(dtype == BFLOAT16 ? BFLOAT16 : FLOAT32);
    decoded_rows_ = BUFFER / (k_ * size_of_decoded()) / 4 * 4;
    decoded_rows_ = decoded_rows_ > 12 ? 12 : decoded_rows_;
    const bool decodes = m >= LEAST_DECODED && decoded_rows_ > 0;
    const bool interleaved = codes.interleaved && interleaved_.takes(format_, dtype, m, group_size, groups);
    way_ = interleaved                                                           ? INTERLEAVED
           : integers_.takes(format_, dtype, m, group_size, groups)              ? OF_INTEGERS
           : decodes                                                             ? DECODED
           : bfloat16_.takes(format_, dtype, m, group_size, groups)              ? OF_BFLOAT16
                                                                                 : IN_FLOAT32;
  }

  // Whether rows packed for one weight are what the other takes.
  bool packs_like(const QuantizedRows& other) const {
    return way_ == other.way_ && (way_ == DECODED || format_ == other.format_);
  }

  int64_t bytes() const {
    const int64_t in_float32 = m_ * ((k_ + functions_.step() - 1) / functions_.step()) * functions_.step() * 4;
    const int64_t own = way_ == INTERLEAVED   ? interleaved_.bytes(format_, dtype_, m_, k_)
                        : way_ == OF_INTEGERS ? integers_.bytes(format_, dtype_, m_, k_)
                        : way_ == OF_BFLOAT16 ? bfloat16_.bytes(format_, dtype_, m_, k_)
                        : way_ == DECODED     ? m_ * ((k_ + packing_.step - 1) / packing_.step) * packing_.step * 4
                                              : 0;
    return own > in_float32 ? own : in_float32;
  }

  // row(i): where row i of x begins, K numbers that are `stride` apart. Returns the way in which they are packed: numbers
  // that are not finite are multiplied in float32.
  template <class Row>
  Way pack(const Row& row, int64_t stride, char* out) const {
    if (way_ == DECODED) {
      const int64_t size = packing_.dtype == FLOAT32 ? 4 : 2;
      for (int64_t i = 0; i < m_; ++i) {
        skinny_.pack(row(i), stride, dtype_, k_, m_, packing_, out + i * packing_.step * size);
      }
      return DECODED;
    }
    if (way_ != IN_FLOAT32) {
      const CodesFunctions& codes = way_ == INTERLEAVED ? interleaved_ : way_ == OF_INTEGERS ? integers_ : bfloat16_;
      bool taken = true;
      for (int64_t i = 0; i < m_ && taken; ++i) taken = codes.pack(row(i), stride, dtype_, k_, m_, i, format_, out);
      if (taken) return way_;
    }
    for (int64_t i = 0; i < m_; ++i) {
      functions_.pack(row(i), stride, dtype_, k_, m_, format_, reinterpret_cast<float*>(out) + i * functions_.step());
    }
    return IN_FLOAT32;
  }

  // The columns [begin, end) of y, of x packed in that way; multiples of 16 where the weight's rows are interleaved.
  void run(Way way, const QuantizedProduct& product, int64_t begin, int64_t end) const {
    if (separate_ && way != INTERLEAVED) return separated(way, product, begin, end);
    switch (way) {
      case INTERLEAVED: return interleaved_.run(&product, begin, end);
      case OF_INTEGERS: return integers_.run(&product, begin, end);
      case OF_BFLOAT16: return bfloat16_.run(&product, begin, end);
      case IN_FLOAT32: return functions_.run(&product, begin, end);
      case DECODED: return decoded(product, begin, end);
    }
  }

 private:
  // From how many rows of x on the weight is decoded, and bytes of decoded rows, which stay in the L1 cache but for very
  // long ones.
  static constexpr int64_t LEAST_DECODED = 5, BUFFER = 1 << 15;

  int64_t size_of_decoded() const { return packing_.dtype == FLOAT32 ? 4 : 2; }

  // For what reads rows one after another: 16 rows at a time are laid so, in memory that stays in the L2 cache.
  void separated(Way way, const QuantizedProduct& product, int64_t begin, int64_t end) const {
    const int64_t stored = product.row_bytes, y_size = product.y_dtype == FLOAT32 ? 4 : 2;
    const int64_t bias_size = product.bias_dtype == FLOAT32 ? 4 : 2;
    const Buffer rows = lines(INTERLEAVED_ROWS * stored);
    for (int64_t n = begin; n < end; n += INTERLEAVED_ROWS) {
      uint8_t* const data = reinterpret_cast<uint8_t*>(rows.get());
      separate_rows(format_, stored, product.data + n * stored, data);
      QuantizedProduct part = product;
      part.data = data, part.scale = product.scale + n * product.scale_stride;
      part.zero = product.zero == nullptr ? nullptr : product.zero + n * product.scale_stride;
      part.bias = product.bias == nullptr ? nullptr : static_cast<const char*>(product.bias) + n * bias_size;
      part.y = static_cast<char*>(product.y) + n * y_size;
      switch (way) {
        case OF_INTEGERS: integers_.run(&part, 0, INTERLEAVED_ROWS); break;
        case OF_BFLOAT16: bfloat16_.run(&part, 0, INTERLEAVED_ROWS); break;
        case DECODED: decoded(part, 0, INTERLEAVED_ROWS); break;
        default: functions_.run(&part, 0, INTERLEAVED_ROWS);
      }
    }
  }

  void decoded(const QuantizedProduct& product, int64_t begin, int64_t end) const {
    alignas(64) char rows[BUFFER];
    const int64_t row_bytes = k_ * size_of_decoded(), y_size = product.y_dtype == FLOAT32 ? 4 : 2;
    const int64_t bias_size = product.bias_dtype == FLOAT32 ? 4 : 2;
    for (int64_t n = begin; n < end; n += decoded_rows_) {
      const int64_t count = end - n < decoded_rows_ ? end - n : decoded_rows_;
      for (int64_t i = 0; i < count; ++i) functions_.decode(&product, n + i, rows + i * row_bytes, packing_.dtype);
      const void* const bias = product.bias == nullptr ? nullptr : static_cast<const char*>(product.bias) + n * bias_size;
      const SkinnyProduct part{product.x, packing_.dtype, product.m, product.n, k_, rows, k_, packing_.dtype, bias,
                               product.bias_dtype, static_cast<char*>(product.y) + n * y_size, product.y_dtype};
      skinny_.run(&part, 0, count);
    }
  }

  const QuantizedFunctions& functions_;
  const CodesFunctions &bfloat16_, &integers_, &interleaved_;
  const SkinnyFunctions& skinny_;
  const bool separate_;
  const int64_t format_, m_, k_;
  const int32_t dtype_;
  SkinnyPacking packing_{};
  int64_t decoded_rows_ = 0;
  Way way_ = IN_FLOAT32;
};

}  // namespace easytorch
