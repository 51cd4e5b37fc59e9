// The operator easytorch_cpu::rms_norm.
#include "cpu_norm.h"

#include "../cpu/levels.h"
#include "../cpu/torch_abi.h"

EASYTORCH_TABLE(NormFunctions, norm)

namespace easytorch {
namespace {

// Numbers below which another thread would cost more than it saves.
constexpr int64_t GRAIN = 1 << 15;

// x (..., N), the last dimension contiguous, weight (N,) likewise or (0,) for none -> (..., N).
void rms_norm(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), weight(stack[1]);
  const double eps = number_of(stack[2]);
  const int64_t level = static_cast<int64_t>(stack[3]);
  require(x.dim >= 1 && weight.dim == 1, "rms_norm takes x (..., N), weight (N,) or (0,)");
  const int64_t n = x.sizes[x.dim - 1], rows = n == 0 ? 0 : x.numel() / n;
  require(n <= 1 || x.strides[x.dim - 1] == 1, "rms_norm: the last dimension must be contiguous");
  require(weight.sizes[0] == 0 || (weight.sizes[0] == n && (n == 1 || weight.strides[0] == 1)),
          "rms_norm: a weight is (N,)");
  const int32_t dtype = element_of(x.dtype);
  require(dtype >= 0 && x.dtype == weight.dtype, "rms_norm takes one dtype: float32, bfloat16 or float16");
  Tensor y(empty_like_rows(x, n));
  const NormFunctions& functions = norm_of(level);
  const int64_t size = dtype == FLOAT32 ? 4 : 2;
  const void* scale = weight.sizes[0] == 0 ? nullptr : weight.data;
  parallel_for(rows, 1 + GRAIN / (n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      functions.rms(static_cast<const char*>(x.data) + row_offset(x, row) * size, scale,
                    static_cast<char*>(y.data) + row * n * size, n, dtype, static_cast<float>(eps));
    }
  });
  stack[0] = y.release();
}

}  // namespace

void register_rms_norm(Library& library) {
  library.define("rms_norm(Tensor x, Tensor weight, float eps, int level) -> Tensor", "rms_norm", rms_norm);
}

}  // namespace easytorch
