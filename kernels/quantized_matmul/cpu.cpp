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
    const int64_t unit = codes.unit();
    parallel_for(n / unit, 1 + GRAIN_BYTES / codes.stored / unit,
                 [&](int64_t begin, int64_t end) { rows.run(way, product, begin * unit, end * unit); });
  }
  stack[0] = y.release();
}

// The codes (N, bytes of a row) with their rows interleaved by 16, or the reverse; (0, 0) where no product would gain by it.
void interleave_codes(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor data(stack[0]);
  const int64_t format = static_cast<int64_t>(stack[1]), k = static_cast<int64_t>(stack[2]);
  const int64_t group_size = static_cast<int64_t>(stack[3]), level = static_cast<int64_t>(stack[5]);
  const bool back = stack[4] != 0;
  require(format >= INT8 && format <= Q6_K && k > 0 && group_size > 0 && data.dim == 2 && data.contiguous() &&
              aoti_torch_dtype_element_size(data.dtype) == 1,
          "interleave_codes takes codes of a byte (N, bytes of a row), contiguous");
  const int64_t stored = stored_bytes(format, k), rows = data.sizes[0] * (back ? INTERLEAVED_ROWS : 1);
  require(data.sizes[1] == (back ? INTERLEAVED_ROWS * stored : stored), "interleave_codes: the codes do not fit");
  const bool gains = interleaves(format, k) && rows % INTERLEAVED_ROWS == 0 &&
                     (back || interleaved_codes_of(level).takes(format, FLOAT32, 1, group_size, (k + group_size - 1) / group_size));
  const int64_t sizes[2] = {!gains ? 0 : back ? rows : rows / INTERLEAVED_ROWS, !gains ? 0 : back ? stored : INTERLEAVED_ROWS * stored};
  Tensor out(empty(2, sizes, data.dtype));
  if (gains) {
    const uint8_t* const from = static_cast<const uint8_t*>(data.data);
    uint8_t* const to = static_cast<uint8_t*>(out.data);
    parallel_for(rows / INTERLEAVED_ROWS, 1 + GRAIN_BYTES / stored / INTERLEAVED_ROWS, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin * INTERLEAVED_ROWS * stored; at < end * INTERLEAVED_ROWS * stored; at += INTERLEAVED_ROWS * stored) {
        back ? separate_rows(format, stored, from + at, to + at) : interleave_rows(format, stored, from + at, to + at);
      }
    });
  }
  stack[0] = out.release();
}

}  // namespace

void register_quantized_matmul(Library& library) {
  library.define(
      "quantized_matmul(Tensor x, Tensor data, Tensor scale, Tensor zero, Tensor bias, int format, int columns, "
      "int group_size, int level) -> Tensor",
      "quantized_matmul", quantized_matmul);
  library.define("interleave_codes(Tensor data, int format, int columns, int group_size, bool back, int level) -> Tensor",
                 "interleave_codes", interleave_codes);
}

}  // namespace easytorch
