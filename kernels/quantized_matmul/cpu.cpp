// The operator easytorch_cpu::quantized_matmul.
#include "../cpu/buffer.h"
#include "cpu_rows.h"

namespace easytorch {
namespace {

constexpr int64_t GRAIN_BYTES = 1 << 14;

// x (..., K), the fields of a QuantizedWeight (N, K), bias (N,), zero and bias (0,) for none -> (..., N).
void quantized_matmul(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), data(stack[1]), scale(stack[2]), zero(stack[3]), bias(stack[4]);
  const Codes codes(data, scale, zero, static_cast<int64_t>(stack[5]), static_cast<int64_t>(stack[6]),
                    static_cast<int64_t>(stack[7]));
  const int64_t n = codes.n, k = codes.k, level = static_cast<int64_t>(stack[8]);
  require(x.dim >= 1 && bias.dim == 1 && x.sizes[x.dim - 1] == k, "quantized_matmul: x and weight do not fit");
  require(bias.sizes[0] == 0 || (bias.sizes[0] == n && (n <= 1 || bias.strides[0] == 1)),
          "quantized_matmul: a bias is (N,)");
  const int32_t dtype = element_of(x.dtype), bias_dtype = element_of(bias.dtype);
  require(dtype >= 0 && bias_dtype >= 0, "quantized_matmul takes float32, bfloat16 or float16");
  const int64_t m = x.numel() / k;
  const QuantizedRows rows(codes, m, dtype, level);
  Tensor y(empty_like_rows(x, n));
  if (m > 0 && n > 0) {
    const Buffer packed = lines(rows.bytes());
    const QuantizedRows::Way way = rows.pack(
        [&](int64_t row) { return static_cast<const char*>(x.data) + row_offset(x, row) * (dtype == FLOAT32 ? 4 : 2); },
        x.strides[x.dim - 1], packed.get());
    const QuantizedProduct product =
        codes.product(packed.get(), m, dtype, bias.sizes[0] == 0 ? nullptr : bias.data, bias_dtype, y.data);
    parallel_for(n, 1 + GRAIN_BYTES / codes.stored,
                 [&](int64_t begin, int64_t end) { rows.run(way, product, begin, end); });
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
