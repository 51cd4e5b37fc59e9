// The operator easytorch_cpu::ssm2.
#include "cpu_scan.h"

#include "../cpu/levels.h"
#include "../cpu/sequences.h"
#include "../cpu/tasks.h"

EASYTORCH_TABLE(Ssm2Functions, ssm2)

namespace easytorch {
namespace {

// Tokens up to which a state is updated token by token: it is read in its own layout.
constexpr int64_t FEW = 3;

// x (B, T, H, P), dt (B, T, H), A (H,) float32, B and C (B, T, G, N), D (H,) or (H, P), z as x, dt_bias (H,), initial
// (B, H, P, N) float32, documents (B, T) int64; an absent one is (0,) -> outputs as x, the last state.
void ssm2(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), dt(stack[1]), A(stack[2]), B(stack[3]), C(stack[4]), D(stack[5]), z(stack[6]);
  const Tensor dt_bias(stack[7]), initial(stack[8]), documents(stack[9]);
  const bool softplus = stack[10] != 0;
  const double least = number_of(stack[11]), greatest = number_of(stack[12]);
  const int64_t level = static_cast<int64_t>(stack[13]);
  require(x.dim == 4 && B.dim == 4, "ssm2 takes x and B of four dimensions");
  Ssm2Call call{};
  call.batch = x.sizes[0], call.length = x.sizes[1], call.heads = x.sizes[2], call.width = x.sizes[3];
  call.groups = B.sizes[2], call.state = B.sizes[3];
  require(call.length > 0 && call.width > 0 && call.state > 0 && call.groups > 0 && call.heads % call.groups == 0,
          "ssm2 takes tokens, and heads a multiple of the groups");
  call.x = sequence_of(x, call.batch, call.length, call.heads, call.width, "ssm2: x is (B, T, H, P)");
  call.z = sequence_of(z, call.batch, call.length, call.heads, call.width, "ssm2: z is (B, T, H, P)");
  call.B = sequence_of(B, call.batch, call.length, call.groups, call.state, "ssm2: B is (B, T, G, N)");
  call.C = sequence_of(C, call.batch, call.length, call.groups, call.state, "ssm2: C is (B, T, G, N)");
  call.dt = sequence_of(dt, call.batch, call.length, 0, call.heads, "ssm2: dt is (B, T, H)");
  require(call.x.data != nullptr && call.C.data != nullptr && call.dt.data != nullptr, "ssm2 takes x, dt, B and C");
  require(A.dim == 1 && A.sizes[0] == call.heads && A.dtype == aoti_torch_dtype_float32() && A.contiguous(),
          "ssm2: A is (H,) of float32");
  call.A = static_cast<const float*>(A.data);
  if (D.dim == 2) {
    require(D.sizes[0] == call.heads && D.sizes[1] == call.width && D.contiguous() && element_of(D.dtype) >= 0,
            "ssm2: D is (H,) or (H, P)");
    call.D = {D.data, element_of(D.dtype), 0, 1, call.width};
  } else {
    call.D = vector_of(D, call.heads, "ssm2: D is (H,) or (H, P)");
  }
  call.dt_bias = vector_of(dt_bias, call.heads, "ssm2: dt_bias is (H,)");
  call.softplus = softplus, call.least = static_cast<float>(least), call.greatest = static_cast<float>(greatest);
  call.documents = documents_of(documents, call.batch, call.length, "ssm2: documents are (B, T) of int64");
  const int64_t states[4] = {call.batch, call.heads, call.width, call.state};
  call.initial = state_of(initial, 4, states, "ssm2: the state is (B, H, P, N) of float32");
  Tensor output(empty(4, x.sizes, x.dtype)), final(empty(4, states, aoti_torch_dtype_float32()));
  call.output = output.data, call.final = static_cast<float*>(final.data);

  const Ssm2Functions& functions = ssm2_of(level);
  const Ssm2Sizes sizes = functions.sizes(&call);
  const int64_t tasks = call.batch * call.heads, work = call.length * call.width * call.state / 8;
  if (call.length <= FEW) {
    run_tasks(tasks, work, sizes.scratch, [&](int64_t task, float* scratch) {
      functions.step(&call, task / call.heads, task % call.heads, scratch);
    });
  } else {
    const int64_t chunks = (call.length + sizes.chunk - 1) / sizes.chunk, groups = call.batch * call.groups;
    const std::unique_ptr<float[]> scores(new float[static_cast<size_t>(groups * chunks * sizes.scores)]);
    call.scores = scores.get();
    run_tasks(groups * chunks, sizes.scores * call.state / 16, sizes.scratch, [&](int64_t task, float* scratch) {
      functions.score(&call, task / (call.groups * chunks), task / chunks % call.groups, task % chunks, scratch);
    });
    run_tasks(tasks, work, sizes.scratch, [&](int64_t task, float* scratch) {
      functions.scan(&call, task / call.heads, task % call.heads, scratch);
    });
  }
  stack[0] = output.release();
  stack[1] = final.release();
}

}  // namespace

void register_ssm2(Library& library) {
  library.define(
      "ssm2(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor z, Tensor dt_bias, Tensor initial, Tensor "
      "documents, bool softplus, float least, float greatest, int level) -> (Tensor, Tensor)",
      "ssm2", ssm2);
}

}  // namespace easytorch
