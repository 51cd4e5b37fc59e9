// The operator easytorch_cpu::flash_backward.
#include "cpu_flash_backward.h"

#include <algorithm>
#include <memory>

#include "../cpu/levels.h"
#include "../cpu/tasks.h"
#include "cpu_flash_call.h"

EASYTORCH_TABLE(FlashGradient, flash_gradient)

namespace easytorch {
namespace {

FlashTensor like_output(const Tensor& tensor, const FlashCall& call, int32_t dtype) {
  require(tensor.dim == 4 && tensor.dtype == dtype && tensor.sizes[0] == call.batch && tensor.sizes[1] == call.length &&
              tensor.sizes[2] == call.heads && tensor.sizes[3] == call.value_dim,
          "flash_backward: output and its gradient do not fit");
  return heads_of(tensor);
}

void zero(const Tensor& tensor) {
  const size_t size = tensor.dtype == aoti_torch_dtype_float32() ? 4 : 2;
  if (tensor.numel() > 0) memset(tensor.data, 0, static_cast<size_t>(tensor.numel()) * size);
}

// How many tasks there are to be at least where a bias broadcasts, and the bytes that they may take for it.
constexpr int64_t LEAST_TASKS = 16, MOST_BYTES = int64_t{1} << 28;

// The pairs of (b, kv head) whose bias is the same have one slice of its gradient. They are divided among lanes, of
// which each adds up its own; the lanes are added in their order, so that no number of threads changes a bit.
struct BiasGradient {
  int64_t slices, members, lanes;  // members: pairs of a slice
  int64_t numbers;                 // of a slice
  int64_t kv_slices, kv_members;   // of one b
  float* output = nullptr;         // (slices, numbers)
  std::unique_ptr<float[]> others;  // (slices, lanes - 1, numbers)

  // bias: null where its gradient is not wanted.
  BiasGradient(FlashGradientCall& work, const Tensor* bias) {
    const FlashCall& call = work.call;
    int64_t sizes[4] = {call.batch, call.kv_heads, 0, 0};  // without a bias each pair has a slice of nothing
    for (int64_t d = 0; d < 4 && bias != nullptr; ++d) {
      sizes[d] = d < 4 - bias->dim ? 1 : bias->sizes[d - (4 - bias->dim)];
    }
    const bool each_head = bias == nullptr || sizes[1] > 1;
    kv_slices = each_head ? call.kv_heads : 1, kv_members = each_head ? 1 : call.kv_heads;
    slices = sizes[0] * kv_slices, members = slices == 0 ? 0 : call.batch * call.kv_heads / slices;
    const int64_t rows = sizes[2], columns = sizes[3];
    numbers = (sizes[1] > 1 ? sizes[1] / kv_slices : 1) * rows * columns;
    work.wants_bias = bias != nullptr;
    work.bias_of_head = sizes[1] > 1 ? rows * columns : 0;
    work.bias_of_row = rows > 1 ? columns : 0, work.bias_of_column = columns > 1 ? 1 : 0;
    lanes = std::min(members, slices == 0 ? 1 : (LEAST_TASKS + slices - 1) / slices);
    const int64_t bytes = 4 * slices * numbers;
    lanes = std::max<int64_t>(std::min(lanes, bytes == 0 ? lanes : 1 + MOST_BYTES / bytes), 1);
    if (lanes > 1 && numbers > 0) others.reset(new float[static_cast<size_t>(slices * (lanes - 1) * numbers)]);
  }

  float* of_lane(int64_t slice, int64_t lane) const {
    if (numbers == 0) return nullptr;
    return lane == 0 ? output + slice * numbers : others.get() + (slice * (lanes - 1) + lane - 1) * numbers;
  }

  // body(b, kv, memory) for the pairs of a lane, whose memory is zero at first.
  template <class Body>
  void each(int64_t task, const Body& body) const {
    const int64_t slice = task / lanes, lane = task % lanes;
    float* const memory = of_lane(slice, lane);
    if (memory != nullptr) memset(memory, 0, static_cast<size_t>(numbers) * sizeof(float));
    for (int64_t n = lane * members / lanes; n < (lane + 1) * members / lanes; ++n) {
      body(slice / kv_slices + n / kv_members, slice % kv_slices + n % kv_members, memory);
    }
  }

  void add_lanes() const {
    parallel_for(lanes > 1 ? slices * numbers : 0, SMALLEST_TASK, [this](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end;) {
        const int64_t slice = at / numbers, stop = std::min(end, (slice + 1) * numbers), first = at - slice * numbers;
        for (int64_t lane = 1; lane < lanes; ++lane) {
          const float* const more = of_lane(slice, lane) + first;
          for (int64_t i = 0; i < stop - at; ++i) output[at + i] += more[i];
        }
        at = stop;
      }
    });
  }
};

// The gradient of the output (B, T, H, Dv), query, key, value, output, logsumexp (B, H, 2, T) and the record of the call ->
// the gradients of query, key, value, bias and sinks. Those of bias, of its shape, and sinks, (H,), are float32; (0,)
// where there is none, or none wanted of the bias.
void flash_backward(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor grad(stack[0]), query(stack[1]), key(stack[2]), value(stack[3]), output(stack[4]), logsumexp(stack[5]);
  const AttentionCall given(stack + 6, true);
  const bool wants_bias = stack[6 + AttentionCall::FIELDS] != 0;
  const int64_t level = static_cast<int64_t>(stack[7 + AttentionCall::FIELDS]);
  FlashGradientCall work{};
  std::optional<Segments> segments;
  work.call = flash_call(query, key, value, given, segments);
  const FlashCall& call = work.call;
  work.grad = like_output(grad, call, query.dtype), work.output = like_output(output, call, query.dtype);
  require(logsumexp.dim == 4 && logsumexp.sizes[0] == call.batch && logsumexp.sizes[1] == call.heads &&
              logsumexp.sizes[2] == 2 && logsumexp.sizes[3] == call.length &&
              (logsumexp.numel() == 0 || logsumexp.contiguous()) && logsumexp.dtype == aoti_torch_dtype_float32(),
          "flash_backward: logsumexp is (B, H, 2, T), contiguous, float32");
  work.logsumexp = static_cast<const float*>(logsumexp.data);
  Tensor grad_query(empty(4, query.sizes, query.dtype)), grad_key(empty(4, key.sizes, query.dtype));
  Tensor grad_value(empty(4, value.sizes, query.dtype));
  work.grad_query = grad_query.data, work.grad_key = grad_key.data, work.grad_value = grad_value.data;
  const int64_t none = 0, sinks = call.rules.sinks == nullptr ? 0 : call.heads;
  require(!wants_bias || static_cast<bool>(given.bias), "flash_backward: there is no bias");
  BiasGradient bias(work, wants_bias ? &*given.bias : nullptr);
  Tensor grad_bias(wants_bias ? empty(given.bias->dim, given.bias->sizes, aoti_torch_dtype_float32())
                              : empty(1, &none, aoti_torch_dtype_float32()));
  bias.output = static_cast<float*>(grad_bias.data);
  Tensor grad_sinks(empty(1, &sinks, aoti_torch_dtype_float32()));
  const std::unique_ptr<float[]> of_heads(new float[static_cast<size_t>(call.batch * call.heads)]());
  work.grad_sinks = of_heads.get();
  if (query.numel() == 0 || key.numel() == 0 || value.numel() == 0) {
    zero(grad_query), zero(grad_key), zero(grad_value), zero(grad_bias);
  } else {
    const FlashGradient& functions = flash_gradient_of(level);
    const int64_t numbers = (functions.scratch(&work) + 3) / 4, group = call.heads / call.kv_heads;
    const int64_t each = group * call.length * call.keys * bias.members / bias.lanes;
    run_tasks(bias.slices * bias.lanes, each, numbers, [&](int64_t task, float* scratch) {
      bias.each(task, [&](int64_t b, int64_t kv, float* memory) {
        functions.run(&work, b, kv, memory, reinterpret_cast<char*>(scratch));
      });
    });
    bias.add_lanes();
  }
  float* const of_sinks = static_cast<float*>(grad_sinks.data);
  for (int64_t h = 0; h < sinks; ++h) {
    of_sinks[h] = 0.0f;
    for (int64_t b = 0; b < call.batch; ++b) of_sinks[h] += of_heads[static_cast<size_t>(b * call.heads + h)];
  }
  stack[0] = grad_query.release(), stack[1] = grad_key.release();
  stack[2] = grad_value.release(), stack[3] = grad_bias.release(), stack[4] = grad_sinks.release();
}

}  // namespace

void register_flash_backward(Library& library) {
  library.define(
      "flash_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp, " ATTENTION_CALL
      ", bool wants_bias, int level) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      "flash_backward", flash_backward);
}

}  // namespace easytorch
