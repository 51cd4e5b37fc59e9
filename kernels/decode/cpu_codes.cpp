// The operator easytorch_cpu::decode_codes: one query over keys and values of one byte, and later ones in its own dtype.
#include <atomic>
#include <memory>
#include <new>

#include "../attention/cpu_call.h"
#include "../cpu/levels.h"
#include "cpu_code_cache.h"

EASYTORCH_TABLE(DecodeFunctions, decode)

namespace easytorch {
namespace {

// As in cpu.cpp: keys of a task, tasks that keep many cores busy, numbers that are worth another thread.
constexpr int64_t CHUNK = 256;
constexpr int64_t TASKS = 64;
constexpr int64_t GRAIN = 1 << 15;

DecodeCache cache_of(const Tensor& tensor, int64_t batch, int64_t kv_heads, int64_t keys, int64_t dim) {
  require(tensor.dim == 4 && tensor.sizes[0] == batch && tensor.sizes[1] == kv_heads && tensor.sizes[2] == keys &&
              tensor.sizes[3] == dim,
          "decode_codes: query, key and value do not fit");
  require(dim <= 1 || tensor.strides[3] == 1, "decode_codes: the last dimension must be contiguous");
  return {tensor.data, tensor.strides[0], tensor.strides[1], tensor.strides[2], nullptr, 0, 0, 0, 0};
}

// query (B, H, 1, D), key (B, K, S, D) and value (B, K, S, Dv) of int8 or float8, key_scale (B, K, S, groups) and
// value_scale, recent_key (B, K, R, D) and recent_value, which follow, in the query's dtype, lengths (B,) of 0..S + R, the
// record of the call over S + R keys -> (B, 1, H, Dv).
void decode_codes(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor query(stack[0]), key(stack[1]), value(stack[2]), key_scale(stack[3]), value_scale(stack[4]);
  const OptionalTensor recent_key(stack[5]), recent_value(stack[6]), lengths(stack[7]);
  const int64_t group_size = static_cast<int64_t>(stack[8]);
  const AttentionCall given(stack + 9);
  const int64_t level = static_cast<int64_t>(stack[9 + AttentionCall::FIELDS]);
  require(query.dim == 4 && key.dim == 4 && value.dim == 4, "decode_codes takes query, key and value of four dimensions");
  const int64_t batch = query.sizes[0], heads = query.sizes[1], dim = query.sizes[3];
  const int64_t kv_heads = key.sizes[1], coded = key.sizes[2], value_dim = value.sizes[3];
  require(query.sizes[2] == 1 && dim > 0 && kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
          "decode_codes takes one query, and heads a multiple of those of the keys");
  const int32_t dtype = element_of(query.dtype), codes = codes_of(key.dtype);
  require(dtype >= 0, "decode_codes takes a query of float32, bfloat16 or float16");
  require(codes != NO_CODES && value.dtype == key.dtype, "decode_codes takes keys and values of int8 or float8, of one dtype");
  require(static_cast<bool>(recent_key) == static_cast<bool>(recent_value), "decode_codes: recent keys have values");
  DecodeCache keys = cache_of(key, batch, kv_heads, coded, dim), values = cache_of(value, batch, kv_heads, coded, value_dim);
  give_scales(keys, key, key_scale, group_size, 1), give_scales(values, value, value_scale, group_size, 1);
  int64_t total = coded;
  DecodeCache recent_keys{}, recent_values{};
  if (recent_key) {
    require(recent_key->dim == 4 && recent_key->dtype == query.dtype && recent_value->dtype == query.dtype,
            "decode_codes: recent keys and values are of the query's dtype");
    const int64_t recent = recent_key->sizes[2];
    recent_keys = cache_of(*recent_key, batch, kv_heads, recent, dim);
    recent_values = cache_of(*recent_value, batch, kv_heads, recent, value_dim);
    total += recent;
  }
  require(!lengths || (lengths->dim == 1 && lengths->dtype == aoti_torch_dtype_int64() && lengths->sizes[0] == batch),
          "decode_codes: lengths are (B,), int64");
  const int64_t sizes[4] = {batch, 1, heads, value_dim};
  Tensor output(empty(4, sizes, query.dtype));
  const ScoreRules rules = given.rules(batch, heads, 1, total);
  const DecodeCall of_codes{dtype, heads, kv_heads, dim, value_dim, keys, values, rules, output.data, codes, 0};
  const DecodeCall of_recent{dtype, heads, kv_heads, dim, value_dim, recent_keys, recent_values, rules, output.data, NO_CODES, coded};
  const DecodeFunctions& functions = decode_of(level);

  // the queries, by group
  const SkinnyPacking packing = functions.packing(dtype);
  const int64_t group = heads / kv_heads, padded = (dim + packing.step - 1) / packing.step * packing.step;
  const int64_t size = dtype == FLOAT32 ? 4 : 2, packed_size = packing.dtype == FLOAT32 ? 4 : 2;
  const std::unique_ptr<char[]> queries(new char[static_cast<size_t>(batch * heads * padded * packed_size)]);
  for (int64_t i = 0; i < batch * heads; ++i) {
    const int64_t h = i % heads, first = i - h + h / group * group;
    char* out = queries.get() + (first * padded + h % group * packing.step) * packed_size;
    const char* row = static_cast<const char*>(query.data) + (i / heads * query.strides[0] + h * query.strides[1]) * size;
    functions.pack(row, query.strides[3], dtype, dim, group, packing, out);
  }

  // tasks: a range of codes, or of the numbers after them, for all heads or for those of one key/value head
  const std::unique_ptr<int64_t[]> ends(new int64_t[static_cast<size_t>(batch + 1)]);
  for (int64_t b = 0; b < batch; ++b) {
    ends[b] = lengths ? static_cast<const int64_t*>(lengths->data)[b * lengths->strides[0]] : total;
    require(0 <= ends[b] && ends[b] <= total, "decode_codes: lengths are 0..S + R");
  }
  const int64_t code_chunks = (coded + CHUNK - 1) / CHUNK, chunks = code_chunks + (total - coded + CHUNK - 1) / CHUNK;
  const int64_t splits = batch * chunks >= TASKS ? 1 : kv_heads, row = functions.sums_row(value_dim);
  const int64_t tasks = batch * chunks * splits, stride = batch * heads * row, bytes = functions.decoded_bytes(&of_codes);
  const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(chunks * stride)]);
  const auto attend = [&](int64_t task, char* decoded) {
    const int64_t kv = task % splits, chunk = task / splits % chunks, b = task / splits / chunks;
    const bool recent = chunk >= code_chunks;
    const int64_t seen = ends[b] - 1 > given.left ? ends[b] - 1 - given.left : 0, part_end = recent ? total : coded;
    const int64_t begin = recent ? coded + (chunk - code_chunks) * CHUNK : chunk * CHUNK;
    const int64_t from = begin > seen ? begin : seen, most = begin + CHUNK < part_end ? begin + CHUNK : part_end;
    const int64_t to = most < ends[b] ? most : ends[b];
    // a range of no keys is a part too, of weight 0
    const DecodePart part{b, from, to < from ? from : to, splits == 1 ? 0 : kv, splits == 1 ? kv_heads : kv + 1, group,
                          queries.get() + b * heads * padded * packed_size,
                          sums.get() + chunk * stride + b * heads * row, nullptr, nullptr, decoded};
    functions.attend(recent ? &of_recent : &of_codes, &part);
  };
  const int64_t numbers = total * kv_heads * (dim + value_dim);
  std::atomic<int64_t> next{0};
  std::atomic<bool> short_of_memory{false};
  parallel_for(tasks, 1 + tasks * GRAIN / (batch * numbers + 1), [&](int64_t, int64_t) {
    const std::unique_ptr<char[]> decoded(new (std::nothrow) char[static_cast<size_t>(bytes)]);
    if (decoded == nullptr) short_of_memory = true;
    for (int64_t task = next++; task < tasks && decoded != nullptr; task = next++) attend(task, decoded.get());
  });
  require(!short_of_memory, "not enough memory for a task");
  parallel_for(batch * heads, 1 + GRAIN / (chunks * row + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      functions.combine(&of_codes, i / heads, i % heads, sums.get() + i * row, chunks, stride);
    }
  });
  stack[0] = output.release();
}

}  // namespace

void register_decode_codes(Library& library) {
  library.define(
      "decode_codes(Tensor query, Tensor key, Tensor value, Tensor key_scale, Tensor value_scale, Tensor? recent_key, "
      "Tensor? recent_value, Tensor? lengths, int group_size, " ATTENTION_CALL ", int level) -> Tensor",
      "decode_codes", decode_codes);
}

}  // namespace easytorch
