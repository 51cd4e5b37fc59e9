// The operator easytorch_cpu::cross_entropy_rows.
#include "cpu_loss.h"

#include "../cpu/buffer.h"
#include "../cpu/levels.h"
#include "../cpu/torch_abi.h"

EASYTORCH_TABLE(LossFunctions, loss)

namespace easytorch {
namespace {

// Numbers below which another thread would cost more than it saves.
constexpr int64_t GRAIN = 1 << 13;
// A vector of the widest instruction set, which the buffer of a row ends with.
constexpr int64_t VECTOR = 16;

// Whether the numbers of a vector lie one after another.
bool dense(const Tensor& vector) { return vector.sizes[0] <= 1 || vector.strides[0] == 1; }

// logits (N, V), the last dimension contiguous, labels (N,) of int64 in 0..V-1 or `ignore_index`, upstream (N,) of
// float32 or (0,) for none -> losses (N,) of float32, 0 of rows that are ignored. With upstream the gradient of the
// logits, in their dtype, is written over them.
void cross_entropy_rows(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor logits(stack[0]), labels(stack[1]), upstream(stack[2]);
  const int64_t ignore_index = static_cast<int64_t>(stack[3]);
  const double smoothing = number_of(stack[4]);
  const auto softcap = given(stack[5]);
  const double z_loss = number_of(stack[6]);
  const int64_t level = static_cast<int64_t>(stack[7]);
  require(logits.dim == 2 && labels.dim == 1 && logits.sizes[0] == labels.sizes[0] && logits.sizes[1] > 0,
          "cross_entropy_rows takes logits (N, V) and labels (N,)");
  const int64_t rows = logits.sizes[0], n = logits.sizes[1];
  const int32_t dtype = element_of(logits.dtype);
  require(dtype >= 0, "cross_entropy_rows takes logits of float32, bfloat16 or float16");
  require(n == 1 || logits.strides[1] == 1, "cross_entropy_rows: the last dimension must be contiguous");
  require(upstream.numel() == 0 || rows <= 1 || logits.strides[0] >= n, "cross_entropy_rows: rows must not overlap");
  require(labels.dtype == aoti_torch_dtype_int64() && dense(labels), "cross_entropy_rows: labels are of int64, contiguous");
  require(upstream.dtype == aoti_torch_dtype_float32() && upstream.dim == 1 && dense(upstream) &&
              (upstream.sizes[0] == rows || upstream.sizes[0] == 0),
          "cross_entropy_rows: upstream is (N,) or (0,) of float32, contiguous");
  const int64_t* const label = static_cast<const int64_t*>(labels.data);
  for (int64_t row = 0; row < rows; ++row) {
    require(label[row] == ignore_index || (label[row] >= 0 && label[row] < n), "cross_entropy_rows: a label is not in 0..V-1");
  }
  Tensor losses(empty(1, &rows, aoti_torch_dtype_float32()));
  float* const loss = static_cast<float*>(losses.data);
  const float* const factor = upstream.sizes[0] == rows ? static_cast<const float*>(upstream.data) : nullptr;
  const LossFunctions& functions = loss_of(level);
  const LossSettings settings{n, dtype, static_cast<float>(smoothing), static_cast<float>(z_loss),
                              softcap ? static_cast<float>(number_of(*softcap)) : 0.0f};
  const int64_t size = dtype == FLOAT32 ? 4 : 2;
  parallel_for(rows, 1 + GRAIN / n, [&](int64_t begin, int64_t end) {
    const Buffer buffer = lines((n + VECTOR) * 4);
    for (int64_t row = begin; row < end; ++row) {
      char* const numbers = static_cast<char*>(logits.data) + row * logits.strides[0] * size;
      if (label[row] == ignore_index) {
        loss[row] = 0.0f;
        if (factor != nullptr) memset(numbers, 0, static_cast<size_t>(n * size));
      } else {
        loss[row] = functions.row(numbers, label[row], factor == nullptr ? nullptr : factor + row, &settings,
                                  reinterpret_cast<float*>(buffer.get()));
      }
    }
  });
  stack[0] = losses.release();
}

}  // namespace

void register_cross_entropy(Library& library) {
  library.define(
      "cross_entropy_rows(Tensor(a!) logits, Tensor labels, Tensor upstream, int ignore_index, float smoothing, float? "
      "softcap, float z_loss, int level) -> Tensor",
      "cross_entropy_rows", cross_entropy_rows);
}

}  // namespace easytorch
