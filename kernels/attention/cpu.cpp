// The operators easytorch_cpu::flash and easytorch_cpu::flash_training.
#include "cpu_flash_call.h"

#include "../cpu/buffer.h"
#include "../cpu/levels.h"
#include "../cpu/tasks.h"
#include "../cpu/threads.h"

EASYTORCH_TABLE(FlashFunctions, flash)

namespace easytorch {
namespace {

// Tasks of a thread between two waits for all: they differ in length.
constexpr int64_t TASKS_OF_THREAD = 16;

// The output (B, T, H, Dv), and log(sum(exp(scores))) (B, H, 2, T) to `logsumexp` where that is not null.
uint64_t attend(const Tensor& query, FlashCall& call, float* logsumexp, int64_t level) {
  const int64_t sizes[4] = {call.batch, call.length, call.heads, call.value_dim};
  Tensor output(empty(4, sizes, query.dtype));
  call.output = output.data, call.logsumexp = logsumexp;
  const int64_t queries = call.batch * call.heads * call.length;
  if (queries == 0 || (call.value_dim == 0 && logsumexp == nullptr)) return output.release();

  const FlashFunctions& functions = flash_of(level);
  const FlashSizes bytes = functions.sizes(&call);
  const int64_t pairs = call.batch * call.kv_heads, group = call.heads / call.kv_heads;
  const int64_t blocks = (call.length + bytes.query_rows - 1) / bytes.query_rows;
  // Heads of keys are packed some at a time, as many as give each thread several tasks: memory that is used again stays in
  // the caches, and new memory costs a fault a page, an eighth of the time of 1,024 queries of 16 heads.
  const int64_t threads = most_threads(), wanted = threads == 1 ? 1 : 1 + TASKS_OF_THREAD * threads / (group * blocks);
  const int64_t at_once = wanted < pairs ? wanted : pairs;
  const Buffer keys = lines(at_once * bytes.packed_keys), values = lines(at_once * bytes.packed_values);
  call.keys_memory = keys.get(), call.values_memory = values.get();
  for (int64_t first = 0; first < pairs; first += at_once) {
    const int64_t count = pairs - first < at_once ? pairs - first : at_once, heads = count * group;
    call.first_pair = first;
    run_tasks(count, call.keys * (call.dim + call.value_dim) / 8, bytes.pack_scratch / 4, [&](int64_t i, float* scratch) {
      functions.pack(&call, (first + i) / call.kv_heads, (first + i) % call.kv_heads, reinterpret_cast<char*>(scratch));
    });
    // the last queries first: they see most where a call is causal
    run_tasks(heads * blocks, call.length * (call.keys + 1) / blocks, bytes.scratch / 4, [&](int64_t task, float* scratch) {
      const int64_t block = blocks - 1 - task / heads, head = first * group + task % heads;
      functions.attend(&call, head / call.heads, head % call.heads, block * bytes.query_rows,
                       reinterpret_cast<char*>(scratch));
    });
  }
  return output.release();
}

// query (B, T, H, D), key (B, S, K, D), value (B, S, K, Dv) and the record of the call -> (B, T, H, Dv).
void flash(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor query(stack[0]), key(stack[1]), value(stack[2]);
  const AttentionCall given(stack + 3, true);
  std::optional<Segments> segments;
  FlashCall call = flash_call(query, key, value, given, segments);
  stack[0] = attend(query, call, nullptr, static_cast<int64_t>(stack[3 + AttentionCall::FIELDS]));
}

// The same, and what flash_backward needs beside it: (B, H, 2, T), float32.
void flash_training(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor query(stack[0]), key(stack[1]), value(stack[2]);
  const AttentionCall given(stack + 3, true);
  std::optional<Segments> segments;
  FlashCall call = flash_call(query, key, value, given, segments);
  const int64_t sizes[4] = {call.batch, call.heads, 2, call.length};
  Tensor logsumexp(empty(4, sizes, aoti_torch_dtype_float32()));
  stack[0] = attend(query, call, static_cast<float*>(logsumexp.data), static_cast<int64_t>(stack[3 + AttentionCall::FIELDS]));
  stack[1] = logsumexp.release();
}

}  // namespace

void register_flash(Library& library) {
  library.define(
      "flash(Tensor query, Tensor key, Tensor value, " ATTENTION_CALL ", int level) -> Tensor",
      "flash", flash);
  library.define(
      "flash_training(Tensor query, Tensor key, Tensor value, " ATTENTION_CALL ", int level) -> (Tensor, Tensor)",
      "flash_training", flash_training);
}

}  // namespace easytorch
