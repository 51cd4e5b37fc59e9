// The operator easytorch_cpu::ssm2_backward.
#include "cpu_scan_backward.h"

#include <algorithm>
#include <limits>

#include "../cpu/levels.h"
#include "../cpu/subnormals.h"
#include "../cpu/tasks.h"
#include "cpu_scan_call.h"

EASYTORCH_TABLE(Ssm2Gradient, ssm2_gradient)

namespace easytorch {
namespace {

// The heads of a group are divided among so many lanes, which add up the gradients of B and C that the heads share; the
// lanes are added in their order, so that no number of threads changes a bit.
constexpr int64_t LANES = 8;

// The gradients of the outputs and of the last state, (B, H, P, N) float32 or (0,), the tensors of ssm2_call, where dt is
// the time step, and before the first state the outputs before the gate -> the gradients of x, dt, A, B, C, D, z and the
// first state, those of x, B, C and z in their dtypes, the others float32.
void ssm2_backward(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor grad(stack[0]), final_grad(stack[1]), x(stack[2]), dt(stack[3]), A(stack[4]), B(stack[5]), C(stack[6]);
  const Tensor D(stack[7]), z(stack[8]), plain(stack[9]), initial(stack[10]), documents(stack[11]);
  const int64_t level = static_cast<int64_t>(stack[12]);
  Ssm2GradientCall work{};
  work.call = ssm2_call(x, dt, A, B, C, D, z, initial, documents);
  Ssm2Call& call = work.call;
  call.least = -std::numeric_limits<float>::infinity(), call.greatest = std::numeric_limits<float>::infinity();
  work.grad = sequence_of(grad, call.batch, call.length, call.heads, call.width,
                          "ssm2_backward: the gradient is (B, T, H, P)");
  require(work.grad.data != nullptr, "ssm2_backward takes the gradient of the outputs");
  work.plain = sequence_of(plain, call.batch, call.length, call.heads, call.width,
                           "ssm2_backward: the outputs before the gate are (B, T, H, P)");
  require((work.plain.data == nullptr) == (call.z.data == nullptr),
          "ssm2_backward takes the outputs before the gate where there is one");
  const int64_t states[4] = {call.batch, call.heads, call.width, call.state}, none[1] = {0};
  work.final_grad = state_of(final_grad, 4, states, "ssm2_backward: the state's gradient is (B, H, P, N)");
  const int32_t wide = aoti_torch_dtype_float32();
  const int64_t steps[3] = {call.batch, call.length, call.heads}, heads[1] = {call.heads};
  const bool has_D = call.D.data != nullptr, has_z = call.z.data != nullptr;
  Tensor of_x(empty(4, x.sizes, x.dtype)), of_dt(empty(3, steps, wide)), of_A(empty(1, heads, wide));
  Tensor of_B(empty(4, B.sizes, B.dtype)), of_C(empty(4, B.sizes, C.dtype)), of_D(empty(D.dim, D.sizes, wide));
  Tensor of_z(has_z ? empty(4, x.sizes, z.dtype) : empty(1, none, wide)), of_initial(empty(4, states, wide));
  const auto numbers = [](const Tensor& tensor) { return static_cast<float*>(tensor.data); };
  work.grad_x = of_x.data, work.grad_z = of_z.data, work.grad_B = of_B.data, work.grad_C = of_C.data;
  work.grad_dt = numbers(of_dt), work.grad_initial = numbers(of_initial);

  const Ssm2Gradient& functions = ssm2_gradient_of(level);
  const int64_t shared = call.heads / call.groups, groups = call.batch * call.groups, all = call.batch * call.heads;
  work.lanes = std::min(LANES, shared);
  const int64_t rows = call.length * call.state, chunks = functions.chunks(&work), scratch = functions.scratch(&work);
  const std::unique_ptr<float[]> of_lanes(new float[static_cast<size_t>(groups * work.lanes * 2 * rows)]);
  const std::unique_ptr<float[]> of_sequences(new float[static_cast<size_t>(all * (1 + call.width))]());
  work.of_lanes = of_lanes.get(), work.grad_A = of_sequences.get(), work.grad_D = of_sequences.get() + all;
  run_tasks(groups * work.lanes, rows * call.width / 4 * shared / std::max<int64_t>(1, work.lanes), scratch,
            [&](int64_t task, float* memory) {
              const FlushSubnormals flushed;
              const int64_t group = task / work.lanes;
              functions.run(&work, group / call.groups, group % call.groups, task % work.lanes, memory);
            });
  run_tasks(groups * chunks, rows / chunks * work.lanes / 8, call.state + 64, [&](int64_t task, float* memory) {
    const int64_t group = task / chunks;
    functions.add_lanes(&work, group / call.groups, group % call.groups, task % chunks, memory);
  });
  float* const to_A = numbers(of_A);
  for (int64_t h = 0; h < call.heads; ++h) {
    to_A[h] = 0.0f;
    for (int64_t b = 0; b < call.batch; ++b) to_A[h] += work.grad_A[b * call.heads + h];
  }
  const int64_t width = D.dim == 2 ? call.width : 1, each = call.width / width;  // numbers of D a head; channels of each
  for (int64_t i = 0; has_D && i < call.heads * width; ++i) {
    double total = 0.0;
    for (int64_t b = 0; b < call.batch; ++b) {
      for (int64_t p = 0; p < each; ++p) total += work.grad_D[(b * call.heads * width + i) * each + p];
    }
    numbers(of_D)[i] = static_cast<float>(total);
  }
  stack[0] = of_x.release(), stack[1] = of_dt.release(), stack[2] = of_A.release(), stack[3] = of_B.release();
  stack[4] = of_C.release(), stack[5] = of_D.release(), stack[6] = of_z.release(), stack[7] = of_initial.release();
}

}  // namespace

void register_ssm2_backward(Library& library) {
  library.define(
      "ssm2_backward(Tensor grad, Tensor final_grad, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor z, "
      "Tensor plain, Tensor initial, Tensor documents, int level) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor)",
      "ssm2_backward", ssm2_backward);
}

}  // namespace easytorch
