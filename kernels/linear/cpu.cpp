// The operator easytorch_cpu::linear.
#include "cpu_skinny.h"

#include <memory>

#include "../cpu/levels.h"
#include "../cpu/torch_abi.h"

EASYTORCH_TABLE(SkinnyFunctions, skinny)

namespace easytorch {
namespace {

// Bytes of a weight below which another thread would cost more than it saves.
constexpr int64_t GRAIN_BYTES = 1 << 15;

// (..., K), weight (N, K) with columns side by side, bias (N,) or (0,) for none -> (..., N).
void linear(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), weight(stack[1]), bias(stack[2]);
  const int64_t level = static_cast<int64_t>(stack[3]);
  require(x.dim >= 1 && weight.dim == 2 && bias.dim == 1, "linear takes x (..., K), weight (N, K), bias (N,) or (0,)");
  const int64_t k = weight.sizes[1], n = weight.sizes[0], m = k == 0 ? 0 : x.numel() / k;
  require(x.sizes[x.dim - 1] == k && (k <= 1 || weight.strides[1] == 1), "linear: x and weight do not fit");
  require(x.dtype == weight.dtype && x.dtype == bias.dtype, "linear takes one dtype");
  require(bias.sizes[0] == 0 || (bias.sizes[0] == n && (n <= 1 || bias.strides[0] == 1)), "linear: a bias is (N,)");
  const int32_t dtype = element_of(x.dtype);
  require(dtype >= 0, "linear takes float32, bfloat16 or float16");
  require(k > 0, "linear: K is 0");
  Tensor y(empty_like_rows(x, n));
  const SkinnyFunctions& functions = skinny_of(level);
  const SkinnyPacking packing = functions.packing(dtype);
  const int64_t size = dtype == FLOAT32 ? 4 : 2, packed_size = packing.dtype == FLOAT32 ? 4 : 2;
  SkinnyProduct product{x.data, packing.dtype, m, n, k, weight.data, weight.strides[0], dtype,
                        bias.sizes[0] == 0 ? nullptr : bias.data, dtype, y.data, dtype};
  std::unique_ptr<char[]> packed;
  if (m != 1 || packing.dtype != dtype || k % packing.step != 0 || !x.contiguous()) {
    packed.reset(new char[static_cast<size_t>(m * ((k + packing.step - 1) / packing.step) * packing.step * packed_size)]);
    product.x = packed.get();
    for (int64_t row = 0; row < m; ++row) {
      functions.pack(static_cast<const char*>(x.data) + row_offset(x, row) * size, x.strides[x.dim - 1], dtype, k, m,
                     packing, packed.get() + row * packing.step * packed_size);
    }
  }
  if (m > 0 && n > 0) {
    const int64_t grain = 1 + GRAIN_BYTES / (k * size);
    parallel_for(n, grain, [&](int64_t begin, int64_t end) { functions.run(&product, begin, end); });
  }
  stack[0] = y.release();
}

}  // namespace

void register_linear(Library& library) {
  library.define("linear(Tensor x, Tensor weight, Tensor bias, int level) -> Tensor", "linear", linear);
}

}  // namespace easytorch
