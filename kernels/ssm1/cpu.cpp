// The operator easytorch_cpu::ssm1.
#include "cpu_scan.h"

#include "../cpu/levels.h"
#include "../cpu/subnormals.h"
#include "../cpu/tasks.h"
#include "cpu_scan_call.h"

EASYTORCH_TABLE(Ssm1Functions, ssm1)

namespace easytorch {
namespace {

// Tokens up to which a state is updated where it lies, channel by channel.
constexpr int64_t FEW = 3;

// x and dt (B, T, C), A (C, N) float32, B and C (B, T, N), D (C,), z as x, dt_bias (C,), initial (B, C, N) float32,
// documents (B, T) int64; an absent one is (0,) -> outputs as x, the last state.
void ssm1(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), dt(stack[1]), A(stack[2]), B(stack[3]), C(stack[4]), D(stack[5]), z(stack[6]);
  const Tensor dt_bias(stack[7]), initial(stack[8]), documents(stack[9]);
  const bool softplus = stack[10] != 0;
  const int64_t level = static_cast<int64_t>(stack[11]);
  Ssm1Call call = scan_call(x, dt, A, B, C, initial, documents);
  call.z = sequence_of(z, call.batch, call.length, 0, call.channels, "ssm1: z is (B, T, C)");
  call.D = vector_of(D, call.channels, "ssm1: D is (C,)");
  call.dt_bias = vector_of(dt_bias, call.channels, "ssm1: dt_bias is (C,)");
  call.softplus = softplus;
  const int64_t states[3] = {call.batch, call.channels, call.state};
  Tensor output(empty(3, x.sizes, x.dtype)), final(empty(3, states, aoti_torch_dtype_float32()));
  call.output = output.data, call.final = static_cast<float*>(final.data);

  const Ssm1Functions& functions = ssm1_of(level);
  const Ssm1Sizes sizes = functions.sizes(&call);
  const int64_t blocks = (call.channels + sizes.channels - 1) / sizes.channels;
  const auto function = call.length <= FEW ? functions.step : functions.scan;
  run_tasks(call.batch * blocks, call.length * sizes.channels * call.state, sizes.scratch, [&](int64_t task, float* scratch) {
    const FlushSubnormals flushed;
    function(&call, task / blocks, task % blocks * sizes.channels, scratch);
  });
  stack[0] = output.release();
  stack[1] = final.release();
}

}  // namespace

void register_ssm1(Library& library) {
  library.define(
      "ssm1(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor z, Tensor dt_bias, Tensor initial, Tensor "
      "documents, bool softplus, int level) -> (Tensor, Tensor)",
      "ssm1", ssm1);
}

}  // namespace easytorch
