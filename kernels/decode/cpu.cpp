// The operator easytorch_cpu::decode.
#include "cpu_attention.h"

#include <atomic>
#include <memory>

#include "../attention/cpu_call.h"
#include "../cpu/levels.h"

EASYTORCH_TABLE(DecodeFunctions, decode)

namespace easytorch {
namespace {

// Keys that are one task, whatever the number of threads: results do not depend on it.
constexpr int64_t CHUNK = 256;
// Tasks that keep many cores busy: below, heads are tasks of their own.
constexpr int64_t TASKS = 64;
// Numbers of keys and values below which another thread would cost more than it saves.
constexpr int64_t GRAIN = 1 << 15;

DecodeCache cache_of(const Tensor& tensor) {
  require(tensor.sizes[3] <= 1 || tensor.strides[3] == 1, "decode: the last dimension must be contiguous");
  return {tensor.data, tensor.strides[0], tensor.strides[1], tensor.strides[2]};
}

// query (B, H, 1, D), key (B, K, S, D), value (B, K, S, Dv), lengths (B,) and the record of the call -> (B, 1, H, Dv).
void decode(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor query(stack[0]), key(stack[1]), value(stack[2]);
  const OptionalTensor lengths(stack[3]);
  const AttentionCall given(stack + 4);
  const int64_t left = given.left, level = static_cast<int64_t>(stack[4 + AttentionCall::FIELDS]);
  require(query.dim == 4 && key.dim == 4 && value.dim == 4, "decode takes query, key and value of four dimensions");
  const int64_t batch = query.sizes[0], heads = query.sizes[1], dim = query.sizes[3];
  const int64_t kv_heads = key.sizes[1], keys = key.sizes[2], value_dim = value.sizes[3];
  require(query.sizes[2] == 1 && dim > 0 && kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
          "decode takes one query, and heads a multiple of those of the keys");
  require(key.sizes[0] == batch && key.sizes[3] == dim && value.sizes[0] == batch && value.sizes[1] == kv_heads &&
              value.sizes[2] == keys,
          "decode: query, key and value do not fit");
  require(key.dtype == query.dtype && value.dtype == query.dtype, "decode takes one dtype");
  const int32_t dtype = element_of(query.dtype);
  require(dtype >= 0, "decode takes float32, bfloat16 or float16");
  require(!lengths || (lengths->dim == 1 && lengths->dtype == aoti_torch_dtype_int64() && lengths->sizes[0] == batch),
          "decode: lengths are (B,), int64");
  const int64_t sizes[4] = {batch, 1, heads, value_dim};
  Tensor output(empty(4, sizes, query.dtype));
  const DecodeFunctions& functions = decode_of(level);
  const DecodeCall call{dtype, heads, kv_heads, dim, value_dim, cache_of(key), cache_of(value),
                        given.rules(batch, heads, 1, keys), output.data};

  // the queries, by group
  const SkinnyPacking packing = functions.packing(dtype);
  const int64_t group = heads / kv_heads, padded = (dim + packing.step - 1) / packing.step * packing.step;
  const int64_t size = dtype == FLOAT32 ? 4 : 2, packed_size = packing.dtype == FLOAT32 ? 4 : 2;
  const std::unique_ptr<char[]> queries(new char[static_cast<size_t>(batch * heads * padded * packed_size)]);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      char* out = queries.get() + ((b * heads + h / group * group) * padded + h % group * packing.step) * packed_size;
      const char* row = static_cast<const char*>(query.data) + (b * query.strides[0] + h * query.strides[1]) * size;
      functions.pack(row, query.strides[3], dtype, dim, group, packing, out);
    }
  }

  // tasks: a range of keys of a sequence, for all heads or for those of one key/value head
  const std::unique_ptr<int64_t[]> range(new int64_t[static_cast<size_t>(2 * batch + 1)]);
  int64_t longest = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t end = lengths ? static_cast<const int64_t*>(lengths->data)[b * lengths->strides[0]] : keys;
    require(0 <= end && end <= keys, "decode: lengths are 0..S");
    range[2 * b] = end - 1 > left ? end - 1 - left : 0;
    range[2 * b + 1] = end;
    longest = end - range[2 * b] > longest ? end - range[2 * b] : longest;
  }
  const int64_t chunks = (longest + CHUNK - 1) / CHUNK;
  const int64_t splits = batch * chunks >= TASKS ? 1 : kv_heads, row = functions.sums_row(value_dim);
  const int64_t tasks = batch * chunks * splits, stride = batch * heads * row;
  const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(chunks * stride)]);
  const auto attend = [&](int64_t task) {
    const int64_t kv = task % splits, chunk = task / splits % chunks, b = task / splits / chunks;
    const int64_t from = range[2 * b] + chunk * CHUNK, end = range[2 * b + 1];
    if (from >= end) return;
    const DecodePart part{b, from, end - from < CHUNK ? end : from + CHUNK, splits == 1 ? 0 : kv,
                          splits == 1 ? kv_heads : kv + 1, group, queries.get() + b * heads * padded * packed_size,
                          sums.get() + chunk * stride + b * heads * row, nullptr, nullptr};
    functions.attend(&call, &part);
  };
  const int64_t numbers = longest * kv_heads * (dim + value_dim);
  // a thread takes the next task when it has done one: those of short sequences take no time
  std::atomic<int64_t> next{0};
  parallel_for(tasks, 1 + tasks * GRAIN / (batch * numbers + 1), [&](int64_t, int64_t) {
    for (int64_t task = next++; task < tasks; task = next++) attend(task);
  });
  parallel_for(batch * heads, 1 + GRAIN / (chunks * row + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / heads, parts = (range[2 * b + 1] - range[2 * b] + CHUNK - 1) / CHUNK;
      functions.combine(&call, b, i % heads, sums.get() + i * row, parts, stride);
    }
  });
  stack[0] = output.release();
}

}  // namespace

void register_decode(Library& library) {
  library.define(
      "decode(Tensor query, Tensor key, Tensor value, Tensor? lengths, " ATTENTION_CALL ", int level) -> Tensor",
      "decode", decode);
}

}  // namespace easytorch
