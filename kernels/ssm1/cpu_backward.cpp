// The operator easytorch_cpu::ssm1_backward.
#include "cpu_scan_backward.h"

#include <algorithm>

#include "../cpu/levels.h"
#include "../cpu/subnormals.h"
#include "../cpu/tasks.h"
#include "cpu_scan_call.h"

EASYTORCH_TABLE(Ssm1Gradient, ssm1_gradient)

namespace easytorch {
namespace {

// The channels of a sequence are divided among so many lanes, which add up the gradients of B and C that the channels
// share; the lanes are added in their order, so that no number of threads changes a bit.
constexpr int64_t LANES = 8;

// The gradients of the outputs and of the last state, (B, C, N) float32 or (0,), and the tensors of ssm1 without D, z,
// dt_bias and softplus -> the gradients of x, dt, A, B, C and the first state, float32.
void ssm1_backward(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor grad(stack[0]), final_grad(stack[1]), x(stack[2]), dt(stack[3]), A(stack[4]), B(stack[5]), C(stack[6]);
  const Tensor initial(stack[7]), documents(stack[8]);
  const int64_t level = static_cast<int64_t>(stack[9]);
  Ssm1GradientCall work{};
  work.call = scan_call(x, dt, A, B, C, initial, documents);
  const Ssm1Call& call = work.call;
  work.grad = sequence_of(grad, call.batch, call.length, 0, call.channels, "ssm1_backward: the gradient is (B, T, C)");
  require(work.grad.data != nullptr, "ssm1_backward takes the gradient of the outputs");
  const int64_t matrix[2] = {call.channels, call.state}, states[3] = {call.batch, call.channels, call.state};
  work.final_grad = state_of(final_grad, 3, states, "ssm1_backward: the state's gradient is (B, C, N)");
  const int32_t wide = aoti_torch_dtype_float32();
  const int64_t shared[3] = {call.batch, call.length, call.state};
  Tensor of_x(empty(3, x.sizes, wide)), of_dt(empty(3, x.sizes, wide)), of_A(empty(2, matrix, wide));
  Tensor of_B(empty(3, shared, wide)), of_C(empty(3, shared, wide)), of_initial(empty(3, states, wide));
  const auto numbers = [](const Tensor& tensor) { return static_cast<float*>(tensor.data); };
  work.grad_x = numbers(of_x), work.grad_dt = numbers(of_dt), work.grad_initial = numbers(of_initial);

  const Ssm1Gradient& functions = ssm1_gradient_of(level);
  const Ssm1Sizes sizes = functions.sizes(&work);
  const int64_t blocks = (call.channels + sizes.channels - 1) / sizes.channels, lanes = std::min(LANES, blocks);
  const int64_t rows = call.length * call.state, of_states = call.channels * call.state;
  const std::unique_ptr<float[]> of_sequences(new float[static_cast<size_t>(call.batch * of_states)]);
  const std::unique_ptr<float[]> of_lanes(new float[static_cast<size_t>(call.batch * lanes * 2 * rows)]());
  work.grad_A = of_sequences.get();
  const int64_t each = rows * sizes.channels * blocks / lanes;
  run_tasks(call.batch * lanes, each, sizes.scratch, [&](int64_t task, float* scratch) {
    const FlushSubnormals flushed;
    const int64_t b = task / lanes, lane = task % lanes;
    float* const memory = of_lanes.get() + task * 2 * rows;
    for (int64_t block = lane * blocks / lanes; block < (lane + 1) * blocks / lanes; ++block) {
      functions.run(&work, b, block * sizes.channels, memory, memory + rows, scratch);
    }
  });
  for (int64_t b = 0; b < call.batch; ++b) {
    float *to_B = numbers(of_B) + b * rows, *to_C = numbers(of_C) + b * rows, *to_A = numbers(of_A);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const float* const from = of_lanes.get() + (b * lanes + lane) * 2 * rows;
      for (int64_t i = 0; i < rows; ++i) to_B[i] = lane == 0 ? from[i] : to_B[i] + from[i];
      for (int64_t i = 0; i < rows; ++i) to_C[i] = lane == 0 ? from[rows + i] : to_C[i] + from[rows + i];
    }
    const float* const from = of_sequences.get() + b * of_states;
    for (int64_t i = 0; i < of_states; ++i) to_A[i] = b == 0 ? from[i] : to_A[i] + from[i];
  }
  if (call.batch == 0) memset(of_A.data, 0, static_cast<size_t>(of_states) * sizeof(float));
  stack[0] = of_x.release(), stack[1] = of_dt.release(), stack[2] = of_A.release();
  stack[3] = of_B.release(), stack[4] = of_C.release(), stack[5] = of_initial.release();
}

}  // namespace

void register_ssm1_backward(Library& library) {
  library.define(
      "ssm1_backward(Tensor grad, Tensor final_grad, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor initial, "
      "Tensor documents, int level) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
      "ssm1_backward", ssm1_backward);
}

}  // namespace easytorch
