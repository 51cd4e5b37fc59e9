// The operator easytorch_cpu::quantized_matmul.
#include "cpu_product.h"

#include "../cpu/buffer.h"
#include "../cpu/levels.h"
#include "../cpu/torch_abi.h"

EASYTORCH_TABLE(QuantizedFunctions, quantized)
EASYTORCH_TABLE(BFloat16CodesFunctions, bfloat16_codes)

namespace easytorch {
namespace {

constexpr int64_t GRAIN_BYTES = 1 << 14;

// Bytes of a row of k columns, or -1 where llama.cpp's blocks do not divide it.
int64_t stored_bytes(int64_t format, int64_t k) {
  const int64_t columns = format >= Q4_K ? 256 : 32;
  switch (format) {
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

// x (..., K), the fields of a QuantizedWeight (N, K), bias (N,), zero and bias (0,) for none -> (..., N).
void quantized_matmul(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), data(stack[1]), scale(stack[2]), zero(stack[3]), bias(stack[4]);
  const int64_t format = static_cast<int64_t>(stack[5]), k = static_cast<int64_t>(stack[6]);
  const int64_t group_size = static_cast<int64_t>(stack[7]), level = static_cast<int64_t>(stack[8]);
  require(format >= INT8 && format <= Q6_K, "quantized_matmul: unknown format");
  require(x.dim >= 1 && data.dim == 2 && scale.dim == 2 && bias.dim == 1, "quantized_matmul: wrong dimensions");
  require(k > 0 && group_size > 0 && x.sizes[x.dim - 1] == k, "quantized_matmul: x and weight do not fit");
  const int64_t n = data.sizes[0], m = x.numel() / k;
  const int64_t stored = stored_bytes(format, k), groups = (k + group_size - 1) / group_size;
  require(data.sizes[1] == stored && (stored == 1 || data.strides[1] == 1), "quantized_matmul: the codes do not fit");
  const bool one = scale.sizes[0] == 1 && scale.sizes[1] == 1;
  require(one || (format < Q8_0 && scale.sizes[0] == n && scale.sizes[1] == groups),
          "quantized_matmul: the scales do not fit");
  require(scale.contiguous() && scale.dtype == aoti_torch_dtype_float32(), "quantized_matmul: scales in float32, dense");
  const bool zeros = zero.numel() != 0;
  require(!zeros || (zero.dim == 2 && zero.sizes[0] == scale.sizes[0] && zero.sizes[1] == scale.sizes[1] &&
                     zero.contiguous() && zero.dtype == aoti_torch_dtype_uint8()),
          "quantized_matmul: the zeros do not fit");
  require(bias.sizes[0] == 0 || (bias.sizes[0] == n && (n <= 1 || bias.strides[0] == 1)),
          "quantized_matmul: a bias is (N,)");
  const int32_t dtype = element_of(x.dtype), bias_dtype = element_of(bias.dtype);
  require(dtype >= 0 && bias_dtype >= 0, "quantized_matmul takes float32, bfloat16 or float16");
  const QuantizedFunctions& functions = quantized_of(level);
  const int64_t step = functions.step();
  require(one || groups == 1 || group_size % step == 0, "quantized_matmul: groups of a multiple of 32 columns");
  Tensor y(empty_like_rows(x, n));
  const BFloat16CodesFunctions& of_bfloat16 = bfloat16_codes_of(level);
  bool in_bfloat16 = dtype == BFLOAT16 && of_bfloat16.takes(format, one ? k : group_size, one ? 1 : groups);
  const auto numbers = [&](int64_t row) {
    return static_cast<const char*>(x.data) + row_offset(x, row) * (dtype == FLOAT32 ? 4 : 2);
  };
  Buffer rows;
  if (in_bfloat16) {
    rows = lines(of_bfloat16.bytes(format, m, k));
    for (int64_t row = 0; row < m && in_bfloat16; ++row) {
      in_bfloat16 = of_bfloat16.pack(numbers(row), x.strides[x.dim - 1], k, m, row, format, rows.get());
    }
  }
  if (!in_bfloat16) {
    rows = lines(m * ((k + step - 1) / step) * step * 4);
    for (int64_t row = 0; row < m; ++row) {
      functions.pack(numbers(row), x.strides[x.dim - 1], dtype, k, m, format,
                     reinterpret_cast<float*>(rows.get()) + row * step);
    }
  }
  const QuantizedProduct product{
      rows.get(), m, n, k, format, static_cast<const uint8_t*>(data.data), n == 0 ? stored : data.strides[0],
      static_cast<const float*>(scale.data), zeros ? static_cast<const uint8_t*>(zero.data) : nullptr,
      one ? 1 : groups, one ? 0 : groups, one ? k : group_size, bias.sizes[0] == 0 ? nullptr : bias.data, bias_dtype,
      y.data, dtype};
  if (m > 0 && n > 0) {
    parallel_for(n, 1 + GRAIN_BYTES / stored, [&](int64_t begin, int64_t end) {
      in_bfloat16 ? of_bfloat16.run(&product, begin, end) : functions.run(&product, begin, end);
    });
  }
  stack[0] = y.release();
}

}  // namespace

void register_quantized_matmul(Library& library) {
  library.define(
      "quantized_matmul(Tensor x, Tensor data, Tensor scale, Tensor zero, Tensor bias, int format, int columns, "
      "int group_size, int level) -> Tensor",
      "quantized_matmul", quantized_matmul);
}

}  // namespace easytorch
