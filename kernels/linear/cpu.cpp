// The operators easytorch_cpu::linear and easytorch_cpu::linear_argmax.
#include "cpu_skinny.h"

#include "../cpu/buffer.h"
#include "../cpu/levels.h"
#include "../cpu/torch_abi.h"

EASYTORCH_TABLE(SkinnyFunctions, skinny)

namespace easytorch {
namespace {

// Bytes of a weight below which another thread costs more than it saves.
constexpr int64_t GRAIN_BYTES = 1 << 15;

// What a call of either operator is given, checked, and its rows of x packed.
class Rows {
 public:
  Rows(const Tensor& x, const Tensor& weight, const Tensor& bias, int64_t level) : functions(skinny_of(level)) {
    require(x.dim >= 1 && weight.dim == 2 && bias.dim == 1, "linear takes x (..., K), weight (N, K), bias (N,) or (0,)");
    k = weight.sizes[1], n = weight.sizes[0], m = k == 0 ? 0 : x.numel() / k;
    require(x.sizes[x.dim - 1] == k && (k <= 1 || weight.strides[1] == 1), "linear: x and weight do not fit");
    require(x.dtype == weight.dtype && x.dtype == bias.dtype, "linear takes one dtype");
    require(bias.sizes[0] == 0 || (bias.sizes[0] == n && (n <= 1 || bias.strides[0] == 1)), "linear: a bias is (N,)");
    dtype = element_of(x.dtype);
    require(dtype >= 0, "linear takes float32, bfloat16 or float16");
    require(k > 0, "linear: K is 0");
    const SkinnyPacking packing = functions.packing(dtype);
    const int64_t packed_size = packing.dtype == FLOAT32 ? 4 : 2;
    size = dtype == FLOAT32 ? 4 : 2;
    product = {x.data, packing.dtype, m, n, k, weight.data, weight.strides[0], dtype,
               bias.sizes[0] == 0 ? nullptr : bias.data, dtype, nullptr, dtype};
    if (m != 1 || packing.dtype != dtype || k % packing.step != 0 || !x.contiguous()) {
      packed_ = lines(m * ((k + packing.step - 1) / packing.step) * packing.step * packed_size);
      product.x = packed_.get();
      for (int64_t row = 0; row < m; ++row) {
        functions.pack(static_cast<const char*>(x.data) + row_offset(x, row) * size, x.strides[x.dim - 1], dtype, k, m,
                       packing, packed_.get() + row * packing.step * packed_size);
      }
    }
  }

  // The product with `count` rows of the weight from `begin` on, into y (M, count).
  SkinnyProduct part(int64_t begin, int64_t count, void* y) const {
    SkinnyProduct part = product;
    part.n = count, part.y = y;
    part.weight = static_cast<const char*>(product.weight) + begin * product.ldw * size;
    if (product.bias != nullptr) part.bias = static_cast<const char*>(product.bias) + begin * size;
    return part;
  }

  const SkinnyFunctions& functions;
  SkinnyProduct product;
  int64_t m, n, k, size;
  int32_t dtype;

 private:
  Buffer packed_;
};

// (..., K), weight (N, K) with a contiguous last dimension, bias (N,) or (0,) for none -> (..., N).
void linear(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), weight(stack[1]), bias(stack[2]);
  const Rows rows(x, weight, bias, static_cast<int64_t>(stack[3]));
  Tensor y(empty_like_rows(x, rows.n));
  if (rows.m > 0 && rows.n > 0) {
    const SkinnyProduct product = rows.part(0, rows.n, y.data);
    const int64_t grain = 1 + GRAIN_BYTES / (rows.k * rows.size);
    parallel_for(rows.n, grain, [&](int64_t begin, int64_t end) { rows.functions.run(&product, begin, end); });
  }
  stack[0] = y.release();
}

// Rows of the weight whose products are in memory at once: as few as give each row of x whole lines.
constexpr int64_t AT_ONCE = 256;

// torch.argmax of the rows that `linear` gives: (..., K) -> (...), int64.
void linear_argmax(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), weight(stack[1]), bias(stack[2]);
  const Rows rows(x, weight, bias, static_cast<int64_t>(stack[3]));
  require(rows.n > 0, "linear_argmax: there is nothing to choose from");
  Tensor chosen(empty(x.dim - 1, x.sizes, aoti_torch_dtype_int64()));
  int64_t* const result = static_cast<int64_t*>(chosen.data);
  const int64_t m = rows.m, blocks = (rows.n + AT_ONCE - 1) / AT_ONCE;
  const std::unique_ptr<float[]> largest(new float[static_cast<size_t>(blocks * m + 1)]);
  const std::unique_ptr<int64_t[]> places(new int64_t[static_cast<size_t>(blocks * m + 1)]);
  parallel_for(m == 0 ? 0 : blocks, 1 + GRAIN_BYTES / (rows.k * rows.size * AT_ONCE), [&](int64_t first, int64_t last) {
    const Buffer y = lines(m * AT_ONCE * rows.size);
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block * AT_ONCE, count = rows.n - begin < AT_ONCE ? rows.n - begin : AT_ONCE;
      const SkinnyProduct product = rows.part(begin, count, y.get());
      rows.functions.run(&product, 0, count);
      for (int64_t i = 0; i < m; ++i) {
        int64_t& place = places[block * m + i];
        place = begin + rows.functions.largest(y.get() + i * count * rows.size, count, rows.dtype, &largest[block * m + i]);
      }
    }
  });
  for (int64_t i = 0; i < m; ++i) {
    int64_t best = 0;
    for (int64_t block = 1; block < blocks; ++block) {
      const float number = largest[block * m + i], before = largest[best * m + i];
      if (before == before && !(number <= before)) best = block;  // the first NaN stays, as in torch
    }
    result[i] = places[best * m + i];
  }
  stack[0] = chosen.release();
}

}  // namespace

void register_linear(Library& library) {
  library.define("linear(Tensor x, Tensor weight, Tensor bias, int level) -> Tensor", "linear", linear);
  library.define("linear_argmax(Tensor x, Tensor weight, Tensor bias, int level) -> Tensor", "linear_argmax", linear_argmax);
}

}  // namespace easytorch
