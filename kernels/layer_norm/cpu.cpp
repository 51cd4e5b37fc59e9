// The operator easytorch_cpu::norm_backward.
#include "cpu_norm.h"

#include <memory>

#include "../cpu/levels.h"
#include "../cpu/tasks.h"

EASYTORCH_TABLE(NormGradient, norm_gradient)

namespace easytorch {
namespace {

// Rows whose gradients of weight and bias are added up before they are added to the others': more of many rows, so that
// there are at most BLOCKS sums, in an order that does not depend on the threads.
constexpr int64_t ROWS = 16, BLOCKS = 32;

struct Rows {
  int64_t n, count, size;
  int32_t dtype;
};

Rows rows_of(const Tensor& x, const char* message) {
  require(x.dim >= 1, message);
  const int64_t n = x.sizes[x.dim - 1];
  require(element_of(x.dtype) >= 0 && (n <= 1 || x.strides[x.dim - 1] == 1), message);
  return {n, n == 0 ? 0 : x.numel() / n, element_of(x.dtype) == FLOAT32 ? 4 : 2, element_of(x.dtype)};
}

// N numbers, up to whole vectors of any instruction set.
inline int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// A weight (N,), or (0,) for none; widened to float32 unless it may stay as it is.
class Weight {
 public:
  Weight(const Tensor& tensor, int64_t n, bool stays, const NormGradient& functions, const char* message) {
    require(tensor.dim == 1 && element_of(tensor.dtype) >= 0, message);
    if (tensor.sizes[0] == 0) return;
    require(tensor.sizes[0] == n && tensor.contiguous(), message);
    data = tensor.data;
    if (stays) return;
    wide_.reset(new float[static_cast<size_t>(padded(n))]);
    functions.widen(tensor.data, n, element_of(tensor.dtype), wide_.get());
    data = wide_.get();
  }
  const void* data = nullptr;

 private:
  std::unique_ptr<float[]> wide_;
};

inline const char* row_at(const Tensor& tensor, int64_t row, int64_t size) {
  return static_cast<const char*>(tensor.data) + row_offset(tensor, row) * size;
}

// grad and x (..., N), weight and bias (N,) or (0,) -> their gradients: of x as x, of the others (N,) of their dtype.
void norm_backward(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor grad(stack[0]), x(stack[1]), weight(stack[2]), bias(stack[3]);
  const float eps = static_cast<float>(number_of(stack[4]));
  const bool centered = stack[5] != 0;
  const int64_t level = static_cast<int64_t>(stack[6]);
  const Rows rows = rows_of(x, "norm_backward takes x (..., N): the last dimension must be contiguous");
  rows_of(grad, "norm_backward takes a gradient (..., N): the last dimension must be contiguous");
  bool fits = grad.dim == x.dim && grad.dtype == x.dtype;
  for (int64_t d = 0; fits && d < x.dim; ++d) fits = grad.sizes[d] == x.sizes[d];
  require(fits, "norm_backward: gradient and x do not fit");
  const NormGradient& functions = norm_gradient_of(level);
  const bool alike = weight.dtype == x.dtype;
  const Weight scale(weight, rows.n, alike, functions, "norm_backward: weight is (N,)");
  require(bias.dim == 1 && element_of(bias.dtype) >= 0, "norm_backward: bias is (N,)");
  const int64_t n = rows.n, size = rows.size, row_numbers = padded(n);
  Tensor grad_x(empty_like_rows(x, n));
  Tensor grad_weight(empty(1, &n, weight.dtype)), grad_bias(empty(1, &n, bias.dtype));
  const int64_t most = (rows.count + BLOCKS - 1) / BLOCKS, each = most > ROWS ? most : ROWS;
  const int64_t blocks = (rows.count + each - 1) / each;
  const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(2 * (blocks + 1) * row_numbers)]());
  run_tasks(blocks, each * n / 4, row_numbers, [&](int64_t block, float* scratch) {
    float* total = sums.get() + 2 * block * row_numbers;
    for (int64_t row = block * each; row < rows.count && row < (block + 1) * each; ++row) {
      functions.backward(row_at(grad, row, size), row_at(x, row, size), scale.data,
                         static_cast<char*>(grad_x.data) + row * n * size, total, total + row_numbers, scratch, n, rows.dtype,
                         alike, eps, centered);
    }
  });
  float* whole = sums.get() + 2 * blocks * row_numbers;  // zeros so far
  for (int64_t block = 0; block < blocks; ++block) {
    const float* total = sums.get() + 2 * block * row_numbers;
    for (int64_t i = 0; i < 2 * row_numbers; ++i) whole[i] += total[i];
  }
  functions.narrow(whole, n, element_of(weight.dtype), grad_weight.data);
  functions.narrow(whole + row_numbers, n, element_of(bias.dtype), grad_bias.data);
  stack[0] = grad_x.release();
  stack[1] = grad_weight.release();
  stack[2] = grad_bias.release();
}

}  // namespace

void register_layer_norm(Library& library) {
  library.define(
      "norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor bias, float eps, bool centered, int level) -> (Tensor, "
      "Tensor, Tensor)",
      "norm_backward", norm_backward);
}

}  // namespace easytorch
