// The operator easytorch_cpu::flash.
#include "cpu_call.h"
#include "cpu_flash.h"

#include <atomic>
#include <memory>
#include <new>

#include "../cpu/levels.h"
#include "../cpu/torch_abi.h"

EASYTORCH_TABLE(FlashFunctions, flash)

namespace easytorch {
namespace {

// Scores below which another thread would cost more than it saves.
constexpr int64_t GRAIN = 1 << 13;
FlashTensor heads_of(const Tensor& tensor) {
  require(tensor.sizes[3] <= 1 || tensor.strides[3] == 1, "flash: the last dimension must be contiguous");
  return {tensor.data, tensor.strides[0], tensor.strides[2], tensor.strides[1]};
}

// query (B, T, H, D), key (B, S, K, D), value (B, S, K, Dv) and the record of the call -> (B, T, H, Dv).
void flash(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor query(stack[0]), key(stack[1]), value(stack[2]);
  const AttentionCall given(stack + 3);
  const int64_t level = static_cast<int64_t>(stack[3 + AttentionCall::FIELDS]);
  require(query.dim == 4 && key.dim == 4 && value.dim == 4, "flash takes query, key and value of four dimensions");
  FlashCall call{};
  const int64_t batch = query.sizes[0];
  call.length = query.sizes[1], call.heads = query.sizes[2], call.dim = query.sizes[3];
  call.keys = key.sizes[1], call.kv_heads = key.sizes[2], call.value_dim = value.sizes[3];
  require(call.dim > 0 && call.kv_heads > 0 && call.heads > 0 && call.heads % call.kv_heads == 0,
          "flash takes heads a multiple of those of the keys");
  require(key.sizes[0] == batch && key.sizes[3] == call.dim && value.sizes[0] == batch && value.sizes[1] == call.keys &&
              value.sizes[2] == call.kv_heads,
          "flash: query, key and value do not fit");
  require(key.dtype == query.dtype && value.dtype == query.dtype, "flash takes one dtype");
  call.dtype = element_of(query.dtype);
  require(call.dtype >= 0, "flash takes float32, bfloat16 or float16");
  call.query = heads_of(query), call.key = heads_of(key), call.value = heads_of(value);
  call.rules = given.rules(batch, call.heads, call.length, call.keys);
  call.left = given.left, call.right = given.right;
  const int64_t sizes[4] = {batch, call.length, call.heads, call.value_dim};
  Tensor output(empty(4, sizes, query.dtype));
  call.output = output.data;
  const int64_t queries = batch * call.heads * call.length;
  if (queries == 0 || call.value_dim == 0) {
    stack[0] = output.release();
    return;
  }

  const FlashFunctions& functions = flash_of(level);
  const FlashSizes bytes = functions.sizes(&call);
  const int64_t pairs = batch * call.kv_heads;
  const std::unique_ptr<char[]> keys(new char[static_cast<size_t>(pairs * bytes.packed_keys)]);
  const std::unique_ptr<char[]> values(new char[static_cast<size_t>(pairs * bytes.packed_values)]);
  call.keys_memory = keys.get(), call.values_memory = values.get();
  parallel_for(pairs, 1 + GRAIN / (call.keys * (call.dim + call.value_dim) + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) functions.pack(&call, i / call.kv_heads, i % call.kv_heads);
  });
  const int64_t blocks = (call.length + bytes.query_rows - 1) / bytes.query_rows, tasks = batch * call.heads * blocks;
  std::atomic<int64_t> next{0};
  std::atomic<bool> short_of_memory{false};
  // A thread takes the next task when it has done one, the last queries first: they see most where a call is causal.
  parallel_for(tasks, 1 + tasks * GRAIN / (queries * (call.keys + 1)), [&](int64_t, int64_t) {
    const std::unique_ptr<char[]> scratch(new (std::nothrow) char[static_cast<size_t>(bytes.scratch)]);
    if (scratch == nullptr) short_of_memory = true;
    for (int64_t task = next++; task < tasks && scratch != nullptr; task = next++) {
      const int64_t b = task / (call.heads * blocks), block = blocks - 1 - task / call.heads % blocks;
      functions.attend(&call, b, task % call.heads, block * bytes.query_rows, scratch.get());
    }
  });
  require(!short_of_memory, "flash: not enough memory for a tile of scores");
  stack[0] = output.release();
}

}  // namespace

void register_flash(Library& library) {
  library.define(
      "flash(Tensor query, Tensor key, Tensor value, " ATTENTION_CALL ", int level) -> Tensor",
      "flash", flash);
}

}  // namespace easytorch
