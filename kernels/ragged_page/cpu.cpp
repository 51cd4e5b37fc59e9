// The operator easytorch_cpu::ragged_page: decode's loops over the pages of each sequence.
#include "../decode/cpu_attention.h"

#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "../attention/cpu_call.h"
#include "../cpu/levels.h"
#include "../decode/cpu_code_cache.h"

EASYTORCH_TABLE(DecodeFunctions, decode)

namespace easytorch {
namespace {

// As in decode/cpu.cpp: keys of a task, tasks that keep many cores busy, numbers that are worth another thread.
constexpr int64_t CHUNK = 256;
constexpr int64_t TASKS = 64;
constexpr int64_t GRAIN = 1 << 15;
// Tasks beyond which longer ranges of keys cost less memory for their sums.
constexpr int64_t MANY_TASKS = 1024;
// Queries of a key/value head that share a reading of the keys, in all rows of a block.
constexpr int64_t QUERIES = 64;
// Integers of 32 or 64 bits.
struct Numbers {
  explicit Numbers(const Tensor& tensor) : tensor(tensor), wide(tensor.dtype == aoti_torch_dtype_int64()) {
    require(wide || tensor.dtype == aoti_torch_dtype_int32(), "ragged_page: tables are of int32 or int64");
  }
  int64_t at(int64_t place) const {
    return wide ? static_cast<const int64_t*>(tensor.data)[place] : static_cast<const int32_t*>(tensor.data)[place];
  }
  const Tensor& tensor;
  bool wide;
};

// Query rows [row, row + rows) of a sequence and the keys [from, to) that they see between them, in `parts` tasks.
struct Block {
  int64_t row, rows, from, to, parts, sums, table, first;
};

DecodeCache pool_of(const Tensor& pages) {
  require(pages.sizes[3] <= 1 || pages.strides[3] == 1, "ragged_page: the last dimension must be contiguous");
  return {pages.data, pages.strides[0], pages.strides[2], pages.strides[1], nullptr, 0, 0, 0, 0};
}

// What each row sees, as keys [seen[2 * row], seen[2 * row + 1]), blocks of rows, and the pages in use, all checked: the
// tables are read once, so that nothing changes them afterwards.
struct Plan {
  std::vector<int64_t> seen, table;
  std::vector<Block> blocks;
};

Plan plan_of(int64_t tokens, int64_t page_count, int64_t page_size, const Numbers& lens, const Numbers& tables,
             const Numbers& starts, int64_t left, int64_t right, int64_t most_rows, int64_t rows_of_block) {
  Plan plan;
  plan.seen.assign(static_cast<size_t>(2 * tokens), 0);
  const int64_t batch = lens.tensor.sizes[0], columns = tables.tensor.sizes[1];
  int64_t end = starts.at(0);
  require(end == 0, "ragged_page: query_start_loc begins at 0");
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t first = end, last = starts.at((b + 1) * starts.tensor.strides[0]);
    const int64_t keys = lens.at(b * lens.tensor.strides[0]);
    require(first <= last && last <= tokens, "ragged_page: query_start_loc never decreases and ends within the tokens");
    const int64_t pages = keys > 0 ? (keys - 1) / page_size + 1 : 0;
    require(last - first <= keys && keys <= UNBOUNDED && pages <= columns,
            "ragged_page: context_lens are at least the query tokens and at most the keys of a row of block_tables");
    end = last;
    if (first == last || last - first > most_rows) continue;
    const int64_t before = keys - (last - first), page = before > left ? (before - left) / page_size : 0;
    const int64_t begin = static_cast<int64_t>(plan.table.size());
    for (int64_t column = page; column < pages; ++column) {
      const int64_t number = tables.at(b * tables.tensor.strides[0] + column * tables.tensor.strides[1]);
      require(0 <= number && number < page_count, "ragged_page: block_tables name pages that there are");
      plan.table.push_back(number);
    }
    for (int64_t row = first; row < last; ++row) {
      const int64_t own = before + row - first, from = own > left ? own - left : 0;
      const int64_t to = own + right < keys ? own + right + 1 : keys;
      plan.seen[static_cast<size_t>(2 * row)] = from;
      plan.seen[static_cast<size_t>(2 * row + 1)] = to < from ? from : to;
    }
    for (int64_t row = first; row < last; row += rows_of_block) {
      const int64_t rows = last - row < rows_of_block ? last - row : rows_of_block;
      const int64_t from = plan.seen[static_cast<size_t>(2 * row)];
      const int64_t to = plan.seen[static_cast<size_t>(2 * (row + rows - 1) + 1)];
      plan.blocks.push_back({row, rows, from, to < from ? from : to, 1, 0, begin, page});
    }
  }
  return plan;
}

// Ranges of keys are tasks of their own where a sequence has one block of rows; returns how many numbers all sums take.
int64_t split(Plan& plan, int64_t numbers_of_row) {
  std::vector<Block>& blocks = plan.blocks;
  const auto parts_of = [&](int64_t chunk) {
    int64_t parts = 0;
    for (size_t i = 0; i < blocks.size(); ++i) {
      const bool alone = (i == 0 || blocks[i - 1].table != blocks[i].table) &&
                         (i + 1 == blocks.size() || blocks[i + 1].table != blocks[i].table);
      const int64_t keys = blocks[i].to - blocks[i].from;
      blocks[i].parts = keys == 0 ? 0 : alone ? (keys + chunk - 1) / chunk : 1;
      parts += blocks[i].parts;
    }
    return parts;
  };
  int64_t chunk = CHUNK, numbers = 0;
  while (parts_of(chunk) > MANY_TASKS && chunk < UNBOUNDED) chunk *= 2;
  for (Block& block : plan.blocks) {
    block.sums = numbers;
    numbers += block.parts * block.rows * numbers_of_row;
  }
  return numbers;
}

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
  require(context_lens.dim == 1 && block_tables.dim == 2 && query_start_loc.dim == 1 &&
              block_tables.sizes[0] == context_lens.sizes[0] && query_start_loc.sizes[0] == context_lens.sizes[0] + 1,
          "ragged_page: tables are (B,), (B, columns) and (B + 1,)");
  const int64_t sizes[3] = {tokens, heads, value_dim};
  Tensor output(empty(3, sizes, query.dtype));
  const DecodeFunctions& functions = decode_of(level);
  DecodeCall call{dtype, heads, kv_heads, dim, value_dim, pool_of(key), pool_of(value),
                  given.rules(1, heads, 1, 0), output.data, codes, 0};
  if (codes != NO_CODES) {
    give_scales(call.key, key, *key_scale, group_size, 2), give_scales(call.value, value, *value_scale, group_size, 2);
  }
  const int64_t group = heads / kv_heads, rows_of_block = group < QUERIES ? QUERIES / group : 1;
  Plan plan = plan_of(tokens, page_count, page_size, Numbers(context_lens), Numbers(block_tables),
                      Numbers(query_start_loc), given.left, given.right, most_rows, rows_of_block);
  const int64_t row = functions.sums_row(value_dim), size = dtype == FLOAT32 ? 4 : 2;
  const int64_t count = split(plan, heads * row), blocks = static_cast<int64_t>(plan.blocks.size());
  int64_t computed = 0;
  for (const Block& block : plan.blocks) computed += block.rows;
  if (computed < tokens && value_dim > 0) memset(output.data, 0, static_cast<size_t>(output.numel() * size));
  if (blocks == 0 || value_dim == 0) {
    stack[0] = output.release();
    return;
  }

  // the queries of a block by key/value head, a row's heads one after another; what each of them sees
  const SkinnyPacking packing = functions.packing(dtype);
  const int64_t padded = (dim + packing.step - 1) / packing.step * packing.step;
  const int64_t packed_size = packing.dtype == FLOAT32 ? 4 : 2, bytes_of_row = heads * padded * packed_size;
  const std::unique_ptr<char[]> queries(new char[static_cast<size_t>(tokens * bytes_of_row)]);
  const std::unique_ptr<int64_t[]> seen(new int64_t[static_cast<size_t>(2 * tokens * group)]);
  for (const Block& block : plan.blocks) {
    for (int64_t i = 0; i < block.rows * heads; ++i) {
      const int64_t r = i / heads, h = i % heads, nth = r * group + h % group, all = block.rows * group;
      char* out = queries.get() + block.row * bytes_of_row + (h / group * all * padded + nth * packing.step) * packed_size;
      const char* from = static_cast<const char*>(query.data) +
                         ((block.row + r) * query.strides[0] + h * query.strides[1]) * size;
      functions.pack(from, query.strides[2], dtype, dim, all, packing, out);
    }
    for (int64_t i = 0; i < 2 * block.rows * group; ++i) {
      seen[2 * block.row * group + i] = plan.seen[static_cast<size_t>(2 * (block.row + i / 2 / group) + i % 2)];
    }
  }

  // tasks: a range of keys of a block, for all heads or for those of one key/value head
  struct Task {
    int64_t block, part, kv;
  };
  std::vector<Task> tasks;
  int64_t parts = 0, numbers = 0;
  for (const Block& block : plan.blocks) parts += block.parts;
  const bool by_head = parts < TASKS;
  for (int64_t i = 0; i < blocks; ++i) {
    numbers += (plan.blocks[i].to - plan.blocks[i].from) * plan.blocks[i].rows * kv_heads * (dim + value_dim);
    for (int64_t part = 0; part < plan.blocks[i].parts; ++part) {
      for (int64_t kv = 0; kv < (by_head ? kv_heads : 1); ++kv) tasks.push_back({i, part, kv});
    }
  }
  const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(count)]);
  const auto attend = [&](const Task& task, char* decoded) {
    const Block& block = plan.blocks[task.block];
    const int64_t keys = block.to - block.from, each = ((keys + block.parts - 1) / block.parts + 63) / 64 * 64;
    const int64_t from = block.from + task.part * each, to = from + each < block.to ? from + each : block.to;
    const DecodePages pages{plan.table.data() + block.table, block.first, page_size};
    const DecodePart part{block.row, from, to < from ? from : to, by_head ? task.kv : 0,
                          by_head ? task.kv + 1 : kv_heads, block.rows * group,
                          queries.get() + block.row * bytes_of_row,
                          sums.get() + block.sums + task.part * block.rows * heads * row, &pages,
                          block.rows == 1 ? nullptr : seen.get() + 2 * block.row * group, decoded};
    functions.attend(&call, &part);
  };
  const int64_t task_count = static_cast<int64_t>(tasks.size());
  // a thread takes the next task when it has done one: they differ in length
  std::atomic<int64_t> next{0};
  std::atomic<bool> short_of_memory{false};
  const int64_t bytes = functions.decoded_bytes(&call);
  parallel_for(task_count, 1 + task_count * GRAIN / (numbers + 1), [&](int64_t, int64_t) {
    const std::unique_ptr<char[]> decoded(bytes == 0 ? nullptr : new (std::nothrow) char[static_cast<size_t>(bytes)]);
    const bool enough = bytes == 0 || decoded != nullptr;
    if (!enough) short_of_memory = true;
    for (int64_t i = next++; i < task_count && enough; i = next++) attend(tasks[static_cast<size_t>(i)], decoded.get());
  });
  require(!short_of_memory, "not enough memory for a task");
  parallel_for(blocks, 1 + blocks * GRAIN / (count + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Block& block = plan.blocks[static_cast<size_t>(i)];
      for (int64_t r = 0; r < block.rows; ++r) {
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t query_of = h / group * block.rows * group + r * group + h % group;
          functions.combine(&call, block.row + r, h, sums.get() + block.sums + query_of * row, block.parts,
                            block.rows * heads * row);
        }
      }
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
