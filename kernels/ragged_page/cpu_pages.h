// Attention of query rows over the pages of their sequences, as tasks: decode's loops over what the tables say.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "../attention/cpu_call.h"
#include "../cpu/buffer.h"
#include "../cpu/torch_abi.h"
#include "../decode/cpu_attention.h"

namespace easytorch {

// As in decode/cpu.cpp: keys of a task, and tasks that keep many cores busy.
constexpr int64_t PAGES_CHUNK = 256, PAGES_TASKS = 64;
// Tasks beyond which longer ranges of keys cost less memory for their sums.
constexpr int64_t MANY_TASKS = 1024;
// Queries of a key/value head that share a reading of the keys, in all rows of a block.
constexpr int64_t QUERIES = 64;
inline int64_t rows_of_block(int64_t group) { return group < QUERIES ? QUERIES / group : 1; }

// Integers of 32 or 64 bits.
struct TableNumbers {
  explicit TableNumbers(const Tensor& tensor) : tensor(tensor), wide(tensor.dtype == aoti_torch_dtype_int64()) {
    require(wide || tensor.dtype == aoti_torch_dtype_int32(), "ragged_page: tables are of int32 or int64");
  }
  int64_t at(int64_t place) const {
    return wide ? static_cast<const int64_t*>(tensor.data)[place] : static_cast<const int32_t*>(tensor.data)[place];
  }
  const Tensor& tensor;
  bool wide;
};

inline void require_tables(const Tensor& context_lens, const Tensor& block_tables, const Tensor& query_start_loc) {
  require(context_lens.dim == 1 && block_tables.dim == 2 && query_start_loc.dim == 1 &&
              block_tables.sizes[0] == context_lens.sizes[0] && query_start_loc.sizes[0] == context_lens.sizes[0] + 1,
          "ragged_page: tables are (B,), (B, columns) and (B + 1,)");
}

// Query rows [row, row + rows) of a sequence and the keys [from, to) that they see between them, in `parts` tasks.
struct PageBlock {
  int64_t row, rows, from, to, parts, sums, table, first;
};

inline DecodeCache pool_of(const Tensor& pages) {
  require(pages.sizes[3] <= 1 || pages.strides[3] == 1, "ragged_page: the last dimension must be contiguous");
  return {pages.data, pages.strides[0], pages.strides[2], pages.strides[1], nullptr, 0, 0, 0, 0};
}

// What each row sees, as keys [seen[2 * row], seen[2 * row + 1]), blocks of rows, and the pages in use, all checked: the
// tables are read once, so that nothing changes them afterwards.
struct PagePlan {
  std::vector<int64_t> seen, table;
  std::vector<PageBlock> blocks;
};

inline PagePlan plan_of(int64_t tokens, int64_t page_count, int64_t page_size, const TableNumbers& lens, const TableNumbers& tables,
             const TableNumbers& starts, int64_t left, int64_t right, int64_t most_rows, int64_t rows_of_block) {
  PagePlan plan;
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
inline int64_t split_pages(PagePlan& plan, int64_t numbers_of_row) {
  std::vector<PageBlock>& blocks = plan.blocks;
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
  int64_t chunk = PAGES_CHUNK, numbers = 0;
  while (parts_of(chunk) > MANY_TASKS && chunk < UNBOUNDED) chunk *= 2;
  for (PageBlock& block : plan.blocks) {
    block.sums = numbers;
    numbers += block.parts * block.rows * numbers_of_row;
  }
  return numbers;
}

// The rows of a plan over pages: `pack` the heads of every row, run all tasks, then `combine` every head. Rows that no
// sequence owns are left alone.
class PagedRows {
 public:
  // call: its sequences are the rows, its output is (N, H, Dv), and neither is empty.
  PagedRows(const DecodeFunctions& functions, const DecodeCall& call, PagePlan plan, int64_t page_size)
      : functions_(functions), call_(call), plan_(std::move(plan)), page_size_(page_size),
        group_(call.heads / call.kv_heads), row_(functions.sums_row(call.value_dim)), packing_(functions.packing(call.dtype)),
        padded_((call.dim + packing_.step - 1) / packing_.step * packing_.step),
        bytes_of_row_(call.heads * padded_ * (packing_.dtype == FLOAT32 ? 4 : 2)) {
    numbers_of_sums = split_pages(plan_, call.heads * row_);
    const int64_t rows = static_cast<int64_t>(plan_.seen.size()) / 2;
    block_of_.assign(static_cast<size_t>(rows), -1);
    seen_.resize(static_cast<size_t>(2 * rows * group_));
    int64_t parts = 0;
    for (size_t i = 0; i < plan_.blocks.size(); ++i) {
      const PageBlock& block = plan_.blocks[i];
      parts += block.parts, computed += block.rows;
      numbers += (block.to - block.from) * block.rows * call.kv_heads * (call.dim + call.value_dim);
      for (int64_t r = block.row; r < block.row + block.rows; ++r) block_of_[static_cast<size_t>(r)] = static_cast<int64_t>(i);
      for (int64_t j = 0; j < 2 * block.rows * group_; ++j) {
        seen_[static_cast<size_t>(2 * block.row * group_ + j)] =
            plan_.seen[static_cast<size_t>(2 * (block.row + j / 2 / group_) + j % 2)];
      }
    }
    by_head_ = parts < PAGES_TASKS;
    for (size_t i = 0; i < plan_.blocks.size(); ++i) {
      for (int64_t part = 0; part < plan_.blocks[i].parts; ++part) {
        for (int64_t kv = 0; kv < (by_head_ ? call.kv_heads : 1); ++kv) tasks_.push_back({static_cast<int64_t>(i), part, kv});
      }
    }
    queries_ = lines(rows * bytes_of_row_);
    sums_.reset(new float[static_cast<size_t>(numbers_of_sums)]);
  }

  bool owned(int64_t row) const { return block_of_[static_cast<size_t>(row)] >= 0; }
  int64_t tasks() const { return static_cast<int64_t>(tasks_.size()); }

  // Head h of a row that a sequence owns: `dim` numbers, `stride` apart. A block's queries of a key/value head lie
  // together, a row's one after another.
  void pack(int64_t row, int64_t h, const char* from, int64_t stride) const { pack_as(row, h, from, stride, call_.dtype); }
  // The same of numbers of another dtype.
  void pack_as(int64_t row, int64_t h, const void* from, int64_t stride, int32_t dtype) const {
    const PageBlock& block = of(row);
    const int64_t nth = (row - block.row) * group_ + h % group_, all = block.rows * group_;
    functions_.pack(from, stride, dtype, call_.dim, all, packing_,
                    queries_.get() + block.row * bytes_of_row_ +
                        (h / group_ * all * padded_ + nth * packing_.step) * (packing_.dtype == FLOAT32 ? 4 : 2));
  }

  // A range of keys of a block, for all heads or for those of one key/value head. decoded: see `DecodePart`.
  void attend(int64_t number, char* decoded) const {
    const Task& task = tasks_[static_cast<size_t>(number)];
    const PageBlock& block = plan_.blocks[static_cast<size_t>(task.block)];
    const int64_t keys = block.to - block.from, each = ((keys + block.parts - 1) / block.parts + 63) / 64 * 64;
    const int64_t from = block.from + task.part * each, to = from + each < block.to ? from + each : block.to;
    const DecodePages pages{plan_.table.data() + block.table, block.first, page_size_};
    const DecodePart part{block.row, from, to < from ? from : to, by_head_ ? task.kv : 0,
                          by_head_ ? task.kv + 1 : call_.kv_heads, block.rows * group_,
                          queries_.get() + block.row * bytes_of_row_,
                          sums_.get() + block.sums + task.part * block.rows * call_.heads * row_, &pages,
                          block.rows == 1 ? nullptr : seen_.data() + 2 * block.row * group_, decoded};
    functions_.attend(&call_, &part);
  }

  // What `combine` of the functions takes of head h of a row that a sequence owns: its sums over each of `parts` ranges of
  // keys, `stride` numbers apart.
  struct Sums {
    float* first;
    int64_t parts, stride;
  };
  Sums sums(int64_t row, int64_t h) const {
    const PageBlock& block = of(row);
    const int64_t query = h / group_ * block.rows * group_ + (row - block.row) * group_ + h % group_;
    return {sums_.get() + block.sums + query * row_, block.parts, block.rows * call_.heads * row_};
  }
  // The output of head h of a row that a sequence owns.
  void combine(int64_t row, int64_t h) const {
    const Sums of_head = sums(row, h);
    functions_.combine(&call_, row, h, of_head.first, of_head.parts, of_head.stride);
  }

  // How many rows a sequence owns, how many numbers of keys and values all tasks read, and those of all sums.
  int64_t computed = 0, numbers = 0, numbers_of_sums = 0;

 private:
  struct Task {
    int64_t block, part, kv;
  };
  const PageBlock& of(int64_t row) const {
    return plan_.blocks[static_cast<size_t>(block_of_[static_cast<size_t>(row)])];
  }

  const DecodeFunctions& functions_;
  const DecodeCall& call_;
  PagePlan plan_;
  const int64_t page_size_, group_, row_;
  const SkinnyPacking packing_;
  const int64_t padded_, bytes_of_row_;
  bool by_head_ = false;
  std::vector<int64_t> block_of_, seen_;
  std::vector<Task> tasks_;
  Buffer queries_;
  std::unique_ptr<float[]> sums_;
};

}  // namespace easytorch
