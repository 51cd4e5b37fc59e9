// The operators easytorch_cpu::ssm2 and ssm2_training.
#include "../cpu/levels.h"
#include "../cpu/subnormals.h"
#include "../cpu/tasks.h"
#include "cpu_scan_call.h"

EASYTORCH_TABLE(Ssm2Functions, ssm2)

namespace easytorch {
namespace {

// Tokens up to which a state is updated token by token: it is read in its own layout.
constexpr int64_t FEW = 3;

// The tensors of ssm2_call and dt_bias (H,) -> outputs as x, the last state; where `training` also the outputs before the
// gate, (B, T, H, P) float32, (0,) where there is no gate.
void run(uint64_t* stack, bool training) {
  const Tensor x(stack[0]), dt(stack[1]), A(stack[2]), B(stack[3]), C(stack[4]), D(stack[5]), z(stack[6]);
  const Tensor dt_bias(stack[7]), initial(stack[8]), documents(stack[9]);
  const bool softplus = stack[10] != 0;
  const double least = number_of(stack[11]), greatest = number_of(stack[12]);
  const int64_t level = static_cast<int64_t>(stack[13]);
  Ssm2Call call = ssm2_call(x, dt, A, B, C, D, z, initial, documents);
  call.dt_bias = vector_of(dt_bias, call.heads, "ssm2: dt_bias is (H,)");
  call.softplus = softplus, call.least = static_cast<float>(least), call.greatest = static_cast<float>(greatest);
  const int64_t states[4] = {call.batch, call.heads, call.width, call.state}, none[1] = {0};
  const bool kept = training && call.z.data != nullptr;
  Tensor output(empty(4, x.sizes, x.dtype)), final(empty(4, states, aoti_torch_dtype_float32()));
  Tensor plain(empty(kept ? 4 : 1, kept ? x.sizes : none, aoti_torch_dtype_float32()));
  call.output = output.data, call.final = static_cast<float*>(final.data);
  call.plain = kept ? static_cast<float*>(plain.data) : nullptr;

  const Ssm2Functions& functions = ssm2_of(level);
  const Ssm2Sizes sizes = functions.sizes(&call);
  const int64_t tasks = call.batch * call.heads, work = call.length * call.width * call.state / 8;
  if (call.length <= FEW) {
    run_tasks(tasks, work, sizes.scratch, [&](int64_t task, float* scratch) {
      const FlushSubnormals flushed;
      functions.step(&call, task / call.heads, task % call.heads, scratch);
    });
  } else {
    const int64_t chunks = (call.length + sizes.chunk - 1) / sizes.chunk, groups = call.batch * call.groups;
    const std::unique_ptr<float[]> scores(new float[static_cast<size_t>(groups * chunks * sizes.scores)]);
    call.scores = scores.get();
    run_tasks(groups * chunks, sizes.scores * call.state / 16, sizes.scratch, [&](int64_t task, float* scratch) {
      const FlushSubnormals flushed;
      functions.score(&call, task / (call.groups * chunks), task / chunks % call.groups, task % chunks, scratch);
    });
    run_tasks(tasks, work, sizes.scratch, [&](int64_t task, float* scratch) {
      const FlushSubnormals flushed;
      functions.scan(&call, task / call.heads, task % call.heads, scratch);
    });
  }
  stack[0] = output.release();
  stack[1] = final.release();
  if (training) stack[2] = plain.release();
}

void ssm2(uint64_t* stack, uint64_t, uint64_t) { run(stack, false); }
void ssm2_training(uint64_t* stack, uint64_t, uint64_t) { run(stack, true); }

}  // namespace

void register_ssm2(Library& library) {
  library.define(
      "ssm2(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor z, Tensor dt_bias, Tensor initial, Tensor "
      "documents, bool softplus, float least, float greatest, int level) -> (Tensor, Tensor)",
      "ssm2", ssm2);
  library.define(
      "ssm2_training(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor z, Tensor dt_bias, Tensor initial, "
      "Tensor documents, bool softplus, float least, float greatest, int level) -> (Tensor, Tensor, Tensor)",
      "ssm2_training", ssm2_training);
}

}  // namespace easytorch
