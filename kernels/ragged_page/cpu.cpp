// The operator easytorch_cpu::ragged_page: decode's loops over the pages of each sequence.
#include <atomic>
#include <memory>
#include <new>

#include "../attention/cpu_call.h"
#include "../cpu/levels.h"
#include "../decode/cpu_code_cache.h"
#include "cpu_pages.h"

EASYTORCH_TABLE(DecodeFunctions, decode)

namespace easytorch {
namespace {

// Numbers that are worth another thread, as in decode/cpu.cpp.
constexpr int64_t GRAIN = 1 << 15;

// query (N, H, D), key_pages (P, size, K, D), value_pages (P, size, K, Dv), context_lens (B,), block_tables (B, columns),
// query_start_loc (B + 1,), key_scale (P, size, K, groups) and value_scale of pages of one byte and how many codes share a
// scale, and the record of the call; row i of a sequence of T rows and S keys sees the keys from
// i + S - T - left to i + S - T + right -> (N, H, Dv), zeros of rows of no sequence or of one of more than most_rows.
void ragged_page(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor query(stack[0]), key(stack[1]), value(stack[2]), context_lens(stack[3]), block_tables(stack[4]),
      query_start_loc(stack[5]);
  const OptionalTensor key_scale(stack[6]), value_scale(stack[7]);
  const int64_t group_size = static_cast<int64_t>(stack[8]);
  const AttentionCall given(stack + 9);
  const uint64_t* const after = stack + 9 + AttentionCall::FIELDS;
  const int64_t most_rows = static_cast<int64_t>(after[0]), level = static_cast<int64_t>(after[1]);
  require(query.dim == 3 && key.dim == 4 && value.dim == 4, "ragged_page takes (N, H, D) and pages of four dimensions");
  const int64_t tokens = query.sizes[0], heads = query.sizes[1], dim = query.sizes[2], value_dim = value.sizes[3];
  const int64_t page_count = key.sizes[0], page_size = key.sizes[1], kv_heads = key.sizes[2];
  require(dim > 0 && page_size > 0 && kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
          "ragged_page takes pages of some keys, and heads a multiple of those of the keys");
  require(key.sizes[3] == dim && value.sizes[0] == page_count && value.sizes[1] == page_size &&
              value.sizes[2] == kv_heads,
          "ragged_page: query, key_pages and value_pages do not fit");
  const int32_t codes = key_scale ? codes_of(key.dtype) : NO_CODES;
  require(key.dtype == value.dtype && (codes != NO_CODES || key.dtype == query.dtype),
          "ragged_page takes one dtype, or pages of int8 or float8 with their scales");
  require(static_cast<bool>(key_scale) == static_cast<bool>(value_scale), "ragged_page: keys and values have scales");
  const int32_t dtype = element_of(query.dtype);
  require(dtype >= 0, "ragged_page takes float32, bfloat16 or float16");
  require(!given.mask && !given.bias, "ragged_page has no mask and no bias");
  require_tables(context_lens, block_tables, query_start_loc);
  const int64_t sizes[3] = {tokens, heads, value_dim};
  Tensor output(empty(3, sizes, query.dtype));
  const DecodeFunctions& functions = decode_of(level);
  DecodeCall call{dtype, heads, kv_heads, dim, value_dim, pool_of(key), pool_of(value),
                  given.rules(1, heads, 1, 0), output.data, codes, 0};
  if (codes != NO_CODES) {
    give_scales(call.key, key, *key_scale, group_size, 2), give_scales(call.value, value, *value_scale, group_size, 2);
  }
  PagePlan plan =
      plan_of(tokens, page_count, page_size, TableNumbers(context_lens), TableNumbers(block_tables),
              TableNumbers(query_start_loc), given.left, given.right, most_rows, rows_of_block(heads / kv_heads));
  const PagedRows rows(functions, call, std::move(plan), page_size);
  const int64_t size = dtype == FLOAT32 ? 4 : 2;
  if (rows.computed < tokens && value_dim > 0) memset(output.data, 0, static_cast<size_t>(output.numel() * size));
  if (rows.computed == 0 || value_dim == 0) {
    stack[0] = output.release();
    return;
  }
  for (int64_t i = 0; i < tokens * heads; ++i) {
    const int64_t row = i / heads, h = i % heads;
    if (!rows.owned(row)) continue;
    const char* from = static_cast<const char*>(query.data) + (row * query.strides[0] + h * query.strides[1]) * size;
    rows.pack(row, h, from, query.strides[2]);
  }
  // a thread takes the next task when it has done one: they differ in length
  std::atomic<int64_t> next{0};
  std::atomic<bool> short_of_memory{false};
  const int64_t tasks = rows.tasks(), bytes = functions.decoded_bytes(&call);
  parallel_for(tasks, 1 + tasks * GRAIN / (rows.numbers + 1), [&](int64_t, int64_t) {
    const std::unique_ptr<char[]> decoded(bytes == 0 ? nullptr : new (std::nothrow) char[static_cast<size_t>(bytes)]);
    const bool enough = bytes == 0 || decoded != nullptr;
    if (!enough) short_of_memory = true;
    for (int64_t i = next++; i < tasks && enough; i = next++) rows.attend(i, decoded.get());
  });
  require(!short_of_memory, "not enough memory for a task");
  parallel_for(tokens, 1 + tokens * GRAIN / (rows.numbers_of_sums + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t h = 0; h < heads && rows.owned(row); ++h) rows.combine(row, h);
    }
  });
  stack[0] = output.release();
}

}  // namespace

void register_ragged_page(Library& library) {
  library.define(
      "ragged_page(Tensor query, Tensor key_pages, Tensor value_pages, Tensor context_lens, Tensor block_tables, "
      "Tensor query_start_loc, Tensor? key_scale, Tensor? value_scale, int group_size, " ATTENTION_CALL
      ", int most_rows, int level) -> Tensor",
      "ragged_page", ragged_page);
}

}  // namespace easytorch
