// The operators easytorch_cpu::attention_step, of a cache or of pages, and easytorch_cpu::feed_forward_step: a decoder
// layer's two halves for one token of each row, each one parallel region.
#include "cpu_products.h"

#include "../attention/cpu_call.h"
#include "../decode/cpu_attention.h"
#include "../glu/cpu_gate.h"
#include "../ragged_page/cpu_pages.h"
#include "../rms_norm/cpu_norm.h"
#include "../rotary/cpu_turn.h"
#include "cpu_step.h"

EASYTORCH_TABLE(DecodeFunctions, decode)
EASYTORCH_TABLE(GateFunctions, gate)
EASYTORCH_TABLE(NormFunctions, norm)
EASYTORCH_TABLE(StepFunctions, step)
EASYTORCH_TABLE(TurnFunctions, turn)

namespace easytorch {
namespace {

// Keys that are one task of attention, and tasks from which heads are no tasks of their own: as in decode's operator.
constexpr int64_t CHUNK = 256, TASKS = 64;

// x (B, 1, D), contiguous: hidden states.
struct Hidden {
  explicit Hidden(const Tensor& x) : data(static_cast<const char*>(x.data)), dtype(element_of(x.dtype)) {
    require(x.dim == 3 && x.sizes[1] == 1 && x.contiguous(), "a step takes hidden states (B, 1, D), contiguous");
    require(dtype >= 0, "a step takes float32, bfloat16 or float16");
    rows = x.sizes[0], width = x.sizes[2];
    require(rows > 0 && width > 0, "a step takes a row at least");
  }
  const char* row(int64_t m) const { return data + m * width * size_of(dtype); }
  const char* data;
  int32_t dtype;
  int64_t rows, width;
};

// (N,) or, for none, (0,).
const void* weight_of(const Tensor& weight, int64_t n, const Tensor& x) {
  require(weight.dim == 1 && (weight.sizes[0] == 0 || weight.sizes[0] == n) && weight.contiguous() &&
              weight.dtype == x.dtype,
          "a step: the weight of a norm does not fit");
  return weight.sizes[0] == 0 ? nullptr : weight.data;
}

// Normalized rows, packed for a product; each thread has its own.
class NormalizedRows {
 public:
  NormalizedRows(const Hidden& x, const void* weight, double eps, int64_t level, int64_t threads,
                 std::initializer_list<const Projection*> projections)
      : x_(x), weight_(weight), eps_(static_cast<float>(eps)), norm_(norm_of(level)),
        packed(level, x.rows, x.width, x.dtype, threads, projections), of_thread_(x.rows * x.width * size_of(x.dtype)),
        rows_(lines(threads * of_thread_)) {}

  PackedRows::Packed make(int64_t thread) const {
    char* const rows = rows_.get() + thread * of_thread_;
    const int64_t row = x_.width * size_of(x_.dtype);
    for (int64_t m = 0; m < x_.rows; ++m) norm_.rms(x_.row(m), weight_, rows + m * row, x_.width, x_.dtype, eps_);
    return packed.pack(rows, thread);
  }

 private:
  const Hidden& x_;
  const void* weight_;
  const float eps_;
  const NormFunctions& norm_;

 public:
  const PackedRows packed;

 private:
  const int64_t of_thread_;
  const Buffer rows_;
};

// Rows [begin, end) of the nth block of a projection.
struct Block {
  Block(const Projection& projection, int64_t task) : begin(task * projection.block()), end(begin + projection.block()) {
    end = end < projection.rows() ? end : projection.rows();
  }
  int64_t begin, end;
};

// The last product of a half: its rows, with x added.
void add_residual(const StepFunctions& step, const Product& product, const Hidden& x, const Projection& projection,
                  int64_t task) {
  const Block block(projection, task);
  product.run(block.begin, block.end);
  const int64_t size = size_of(x.dtype);
  for (int64_t m = 0; m < x.rows; ++m) {
    step.add(x.row(m) + block.begin * size, product.y() + (m * x.width + block.begin) * size,
             block.end - block.begin, x.dtype);
  }
}

// x + down(unit(gate(norm(x))) * up(norm(x))).
void feed_forward_step(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor hidden(stack[0]), norm(stack[1]);
  const Projection gate(stack + 2), up(stack + 2 + Projection::FIELDS), down(stack + 2 + 2 * Projection::FIELDS);
  const uint64_t* const after = stack + 2 + 3 * Projection::FIELDS;
  const double eps = number_of(after[0]);
  const int64_t activation = static_cast<int64_t>(after[1]), threads = static_cast<int64_t>(after[2]);
  const int64_t level = static_cast<int64_t>(after[3]);
  const Hidden x(hidden);
  const int64_t inner = gate.weight.dim == 2 ? gate.rows() : 0, size = size_of(x.dtype);
  require(gate.fits(inner, x.width, hidden.dtype) && up.fits(inner, x.width, hidden.dtype) &&
              down.fits(x.width, inner, hidden.dtype),
          "feed_forward_step: the projections do not fit");
  require(activation >= SILU && activation <= GELU_TANH && threads > 0, "feed_forward_step: no such activation or threads");
  Tensor y(empty(3, hidden.sizes, hidden.dtype));
  const GateFunctions& unit = gate_of(level);
  const StepFunctions& step = step_of(level);
  const NormalizedRows rows(x, weight_of(norm, x.width, hidden), eps, level, threads, {&gate, &up});
  const PackedRows inner_rows(level, x.rows, inner, x.dtype, threads, {&down});
  const Buffer gates = lines(x.rows * inner * size), ups = lines(x.rows * inner * size);
  Phase opening(gate.tasks(), threads), closing(down.tasks(), threads);
  parallel_for(threads, 1, [&](int64_t thread, int64_t) {
    const PackedRows::Packed normalized = rows.make(thread);
    const Product to_gate = rows.packed.product(normalized, 0, gates.get());
    const Product to_up = rows.packed.product(normalized, 1, ups.get());
    opening.run(thread, [&](int64_t task) {
      const Block block(gate, task);
      to_gate.run(block.begin, block.end);
      to_up.run(block.begin, block.end);
      for (int64_t m = 0; m < x.rows; ++m) {
        const int64_t at = (m * inner + block.begin) * size;
        unit.run(gates.get() + at, ups.get() + at, gates.get() + at, block.end - block.begin, x.dtype, activation);
      }
    });
    const Product to_hidden = inner_rows.product(inner_rows.pack(gates.get(), thread), 0, y.data);
    closing.run(thread, [&](int64_t task) { add_residual(step, to_hidden, x, down, task); });
  });
  stack[0] = y.release();
}

// The tables of the rotation, (B or 1, 1, R); R is 0 for none.
struct Angles {
  Angles(const Tensor& cos, const Tensor& sin, int64_t batch, int64_t dim, const Tensor& x) : cos(cos), sin(sin) {
    require(cos.dim == 3 && sin.dim == 3 && cos.dtype == x.dtype && sin.dtype == x.dtype,
            "attention_step: cos and sin are (B or 1, 1, R)");
    for (int64_t d = 0; d < 3; ++d) require(cos.sizes[d] == sin.sizes[d], "attention_step: cos and sin do not fit");
    turned = cos.sizes[2];
    require((cos.sizes[0] == 1 || cos.sizes[0] == batch) && cos.sizes[1] == 1 && turned <= dim && turned % 2 == 0 &&
                cos.contiguous(2) && sin.contiguous(2),
            "attention_step: cos and sin do not fit");
  }
  const void* row(const Tensor& table, int64_t b, int64_t size) const {
    return static_cast<const char*>(table.data) + (table.sizes[0] == 1 ? 0 : b) * table.strides[0] * size;
  }
  const Tensor &cos, &sin;
  int64_t turned;
};

// (B, K, C, D) with a contiguous last dimension, from key `first` on.
DecodeCache cache_of(const Tensor& tensor, int64_t batch, int64_t heads, int64_t dim, int64_t first, int64_t end,
                     const Tensor& x) {
  require(tensor.dim == 4 && tensor.dtype == x.dtype && tensor.sizes[0] == batch && tensor.sizes[1] == heads &&
              tensor.sizes[3] == dim && (dim == 1 || tensor.strides[3] == 1),
          "attention_step: the cache is (B, K, C, D)");
  require(0 <= first && first < end && end <= tensor.sizes[2], "attention_step: the cache has no such keys");
  const int64_t size = static_cast<int64_t>(aoti_torch_dtype_element_size(tensor.dtype));
  return {static_cast<const char*>(tensor.data) + first * tensor.strides[2] * size, tensor.strides[0], tensor.strides[1],
          tensor.strides[2]};
}

// Of key n, counted from the first that is seen.
char* key_at(const DecodeCache& cache, int64_t b, int64_t head, int64_t n, int64_t size) {
  return static_cast<char*>(const_cast<void*>(cache.data)) +
         (b * cache.of_batch + head * cache.of_head + n * cache.of_key) * size;
}

// What both operators of attention are given at first.
struct AttentionInputs {
  static constexpr int FIELDS = 6 + 4 * Projection::FIELDS;

  explicit AttentionInputs(const uint64_t* stack)
      : hidden(stack[0]), norm(stack[1]), to_query(stack + 2), to_key(stack + 2 + Projection::FIELDS),
        to_value(stack + 2 + 2 * Projection::FIELDS), to_output(stack + 2 + 3 * Projection::FIELDS),
        query_norm(stack[FIELDS - 4]), key_norm(stack[FIELDS - 3]), cos(stack[FIELDS - 2]), sin(stack[FIELDS - 1]),
        x(hidden) {}

  // Of keys and values of these sizes; `threads` and the call are looked at too.
  void check(const AttentionCall& given, int64_t threads) {
    require(kv_heads > 0 && dim > 0 && value_dim > 0 && to_query.weight.dim == 2 &&
                to_query.rows() % (kv_heads * dim) == 0,
            "attention_step: heads a multiple of those of the keys are needed");
    heads = to_query.rows() / dim, group = heads / kv_heads;
    require(heads > 0 && to_query.fits(heads * dim, x.width, hidden.dtype) &&
                to_key.fits(kv_heads * dim, x.width, hidden.dtype) &&
                to_value.fits(kv_heads * value_dim, x.width, hidden.dtype) &&
                to_output.fits(x.width, heads * value_dim, hidden.dtype),
            "attention_step: the projections do not fit");
    require(!given.bias && threads > 0, "attention_step has no bias, and takes threads");
  }

  const Tensor hidden, norm;
  const Projection to_query, to_key, to_value, to_output;
  const Tensor query_norm, key_norm, cos, sin;
  const Hidden x;
  int64_t heads = 0, kv_heads = 0, dim = 0, value_dim = 0, group = 0;
};

// Attention of a token of each row over a dense cache. `pack` the heads of every row, whose keys and values are written to
// where `key_at` and `value_at` say, then run all tasks, then `combine` every head: as `PagedRows`.
class DenseRows {
 public:
  DenseRows(const DecodeFunctions& functions, const DecodeCall& call, int64_t batch, int64_t seen, int64_t slot)
      : functions_(functions), call_(call), batch_(batch), seen_(seen), slot_(slot), size_(size_of(call.dtype)),
        group_(call.heads / call.kv_heads), packing_(functions.packing(call.dtype)),
        padded_((call.dim + packing_.step - 1) / packing_.step * packing_.step), packed_size_(size_of(packing_.dtype)),
        chunks_((seen + CHUNK - 1) / CHUNK), splits_(batch * chunks_ >= TASKS ? 1 : call.kv_heads),
        row_(functions.sums_row(call.value_dim)), stride_(batch * call.heads * row_),
        queries_(lines(batch * call.heads * padded_ * packed_size_)), sums_(new float[static_cast<size_t>(chunks_ * stride_)]) {}

  char* key_at(int64_t b, int64_t kv) const { return easytorch::key_at(call_.key, b, kv, slot_, size_); }
  char* value_at(int64_t b, int64_t kv) const { return easytorch::key_at(call_.value, b, kv, slot_, size_); }
  void pack(int64_t b, int64_t h, const char* from, int64_t stride) const {
    functions_.pack(from, stride, call_.dtype, call_.dim, group_, packing_,
                    queries_.get() + ((b * call_.heads + h / group_ * group_) * padded_ + h % group_ * packing_.step) *
                                         packed_size_);
  }
  int64_t tasks() const { return batch_ * chunks_ * splits_; }
  void attend(int64_t task, char*) const {
    const int64_t kv = task % splits_, chunk = task / splits_ % chunks_, b = task / splits_ / chunks_;
    const int64_t from = chunk * CHUNK;
    const DecodePart part{b, from, seen_ - from < CHUNK ? seen_ : from + CHUNK, splits_ == 1 ? 0 : kv,
                          splits_ == 1 ? call_.kv_heads : kv + 1, group_,
                          queries_.get() + b * call_.heads * padded_ * packed_size_,
                          sums_.get() + chunk * stride_ + b * call_.heads * row_, nullptr, nullptr};
    functions_.attend(&call_, &part);
  }
  void combine(int64_t b, int64_t h) const {
    functions_.combine(&call_, b, h, sums_.get() + (b * call_.heads + h) * row_, chunks_, stride_);
  }

 private:
  const DecodeFunctions& functions_;
  const DecodeCall& call_;
  const int64_t batch_, seen_, slot_, size_, group_;
  const SkinnyPacking packing_;
  const int64_t padded_, packed_size_, chunks_, splits_, row_, stride_;
  const Buffer queries_;
  const std::unique_ptr<float[]> sums_;
};

// A token of each row over pages: slots (N,), -1 for a token that is not kept.
class PagedStepRows : public PagedRows {
 public:
  PagedStepRows(const DecodeFunctions& functions, const DecodeCall& call, PagePlan plan, int64_t page_size,
                std::vector<int64_t> slots)
      : PagedRows(functions, call, std::move(plan), page_size), call_(call), page_size_(page_size),
        size_(size_of(call.dtype)), slots_(std::move(slots)) {}

  char* key_at(int64_t row, int64_t kv) const { return at(call_.key, row, kv); }
  char* value_at(int64_t row, int64_t kv) const { return at(call_.value, row, kv); }

 private:
  char* at(const DecodeCache& pool, int64_t row, int64_t kv) const {
    const int64_t slot = slots_[static_cast<size_t>(row)];
    return slot < 0 ? nullptr : easytorch::key_at(pool, slot / page_size_, kv, slot % page_size_, size_);
  }

  const DecodeCall& call_;
  const int64_t page_size_, size_;
  const std::vector<int64_t> slots_;
};

// x + o(attention(rotated(q(norm(x))), keys, values)), after the tokens' keys and values were written. attended: the output
// of `over`, (B, H, Dv).
template <class Rows>
uint64_t attend_step(const AttentionInputs& in, const Rows& over, char* attended, double eps, double head_eps,
                     int64_t threads, int64_t level) {
  const Hidden& x = in.x;
  const int32_t dtype = x.dtype;
  const int64_t batch = x.rows, size = size_of(dtype), heads = in.heads, kv_heads = in.kv_heads, dim = in.dim,
                value_dim = in.value_dim, group = in.group;
  const void *query_weight = weight_of(in.query_norm, dim, in.hidden), *key_weight = weight_of(in.key_norm, dim, in.hidden);
  const Angles angles(in.cos, in.sin, batch, dim, in.hidden);
  const NormFunctions& norms = norm_of(level);
  const StepFunctions& step = step_of(level);
  const TurnFunctions& turns = turn_of(level);
  const NormalizedRows rows(x, weight_of(in.norm, x.width, in.hidden), eps, level, threads,
                            {&in.to_query, &in.to_key, &in.to_value});
  const PackedRows output_rows(level, batch, heads * value_dim, dtype, threads, {&in.to_output});
  const Buffer query = lines(batch * heads * dim * size), key = lines(batch * kv_heads * dim * size),
              value = lines(batch * kv_heads * value_dim * size), heads_of_threads = lines(2 * threads * dim * size);
  Tensor y(empty(3, in.hidden.sizes, in.hidden.dtype));

  // A head of the query or of the keys: normalized where there is a weight, and rotated.
  const auto rotate = [&](const char* from, const void* weight, char* to, int64_t b, char* between) {
    char* const normalized = angles.turned > 0 ? between : to;
    if (weight != nullptr) norms.rms(from, weight, normalized, dim, dtype, static_cast<float>(head_eps));
    const char* const source = weight != nullptr ? normalized : from;
    if (angles.turned > 0) {
      turns.halves(source, angles.row(in.cos, b, size), angles.row(in.sin, b, size), to, angles.turned, dim, dtype);
    } else if (source != to) {
      memcpy(to, source, static_cast<size_t>(dim * size));
    }
  };
  // The heads that share a key/value head: queries rotated and packed, key and value written to the cache.
  const auto turn_group = [&](int64_t thread, int64_t task) {
    const int64_t b = task / kv_heads, kv = task % kv_heads;
    char* const between = heads_of_threads.get() + 2 * thread * dim * size;
    char* const turned = between + dim * size;
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
      rotate(query.get() + (b * heads + h) * dim * size, query_weight, turned, b, between);
      over.pack(b, h, turned, 1);
    }
    char* const kept = over.key_at(b, kv);
    if (kept == nullptr) return;
    rotate(key.get() + task * dim * size, key_weight, kept, b, between);
    memcpy(over.value_at(b, kv), value.get() + task * value_dim * size, static_cast<size_t>(value_dim * size));
  };

  Phase projecting(in.to_query.tasks() + in.to_key.tasks() + in.to_value.tasks(), threads),
      turning(batch * kv_heads, threads), attending(over.tasks(), threads), combining(batch * heads, threads),
      closing(in.to_output.tasks(), threads);
  parallel_for(threads, 1, [&](int64_t thread, int64_t) {
    const PackedRows::Packed normalized = rows.make(thread);
    const Product of_query = rows.packed.product(normalized, 0, query.get());
    const Product of_key = rows.packed.product(normalized, 1, key.get());
    const Product of_value = rows.packed.product(normalized, 2, value.get());
    const auto project = [&](const Projection& projection, const Product& product, int64_t task) {
      const Block block(projection, task);
      product.run(block.begin, block.end);
    };
    projecting.run(thread, [&](int64_t task) {
      if (task < in.to_query.tasks()) return project(in.to_query, of_query, task);
      task -= in.to_query.tasks();
      if (task < in.to_key.tasks()) return project(in.to_key, of_key, task);
      project(in.to_value, of_value, task - in.to_key.tasks());
    });
    turning.run(thread, [&](int64_t task) { turn_group(thread, task); });
    attending.run(thread, [&](int64_t task) { over.attend(task, nullptr); });
    combining.run(thread, [&](int64_t task) { over.combine(task / heads, task % heads); });
    const Product to_hidden = output_rows.product(output_rows.pack(attended, thread), 0, y.data);
    closing.run(thread, [&](int64_t task) { add_residual(step, to_hidden, x, in.to_output, task); });
  });
  return y.release();
}

// Over a cache (B, K, C, D): the token's key and value are written to `slot`, and the keys [first, end) are seen.
void attention_step(uint64_t* stack, uint64_t, uint64_t) {
  AttentionInputs in(stack);
  const Tensor keys(stack[AttentionInputs::FIELDS]), values(stack[AttentionInputs::FIELDS + 1]);
  const AttentionCall given(stack + AttentionInputs::FIELDS + 2);
  const uint64_t* const after = stack + AttentionInputs::FIELDS + 2 + AttentionCall::FIELDS;
  const double eps = number_of(after[0]), head_eps = number_of(after[1]);
  const int64_t first = static_cast<int64_t>(after[2]), slot = static_cast<int64_t>(after[3]),
                end = static_cast<int64_t>(after[4]);
  const int64_t threads = static_cast<int64_t>(after[5]), level = static_cast<int64_t>(after[6]);
  const int64_t batch = in.x.rows, seen = end - first;
  require(keys.dim == 4 && values.dim == 4, "attention_step: the cache is (B, K, C, D)");
  in.kv_heads = keys.sizes[1], in.dim = keys.sizes[3], in.value_dim = values.sizes[3];
  in.check(given, threads);
  require(given.left == UNBOUNDED, "attention_step has no window: `first` is given");
  require(first <= slot && slot < end, "attention_step: the token is none of the keys");
  const DecodeCache key_cache = cache_of(keys, batch, in.kv_heads, in.dim, first, end, in.hidden);
  const DecodeCache value_cache = cache_of(values, batch, in.kv_heads, in.value_dim, first, end, in.hidden);
  const Buffer attended = lines(batch * in.heads * in.value_dim * size_of(in.x.dtype));
  const DecodeCall call{in.x.dtype, in.heads, in.kv_heads, in.dim, in.value_dim, key_cache, value_cache,
                        given.rules(batch, in.heads, 1, seen), attended.get()};
  const DenseRows rows(decode_of(level), call, batch, seen, slot - first);
  stack[0] = attend_step(in, rows, attended.get(), eps, head_eps, threads, level);
}

// Over pages (P, size, K, D): row n's key and value are written to slots[n], page * size + offset, -1 for none, before any
// row attends; what a row sees is what ragged_page's tables and the window say. Every row is a sequence's.
void attention_step_pages(uint64_t* stack, uint64_t, uint64_t) {
  AttentionInputs in(stack);
  const uint64_t* const others = stack + AttentionInputs::FIELDS;
  const Tensor keys(others[0]), values(others[1]), slots(others[2]), context_lens(others[3]), block_tables(others[4]),
      query_start_loc(others[5]);
  const AttentionCall given(others + 6);
  const uint64_t* const after = others + 6 + AttentionCall::FIELDS;
  const double eps = number_of(after[0]), head_eps = number_of(after[1]);
  const int64_t threads = static_cast<int64_t>(after[2]), level = static_cast<int64_t>(after[3]);
  const int64_t tokens = in.x.rows;
  require(keys.dim == 4 && values.dim == 4 && keys.dtype == in.hidden.dtype && values.dtype == in.hidden.dtype,
          "attention_step_pages: the pages are (P, size, K, D), of the dtype of the hidden states");
  const int64_t page_count = keys.sizes[0], page_size = keys.sizes[1];
  require(page_size > 0 && values.sizes[0] == page_count && values.sizes[1] == page_size && values.sizes[2] == keys.sizes[2],
          "attention_step_pages: key_pages and value_pages do not fit");
  in.kv_heads = keys.sizes[2], in.dim = keys.sizes[3], in.value_dim = values.sizes[3];
  in.check(given, threads);
  require(!given.mask, "attention_step_pages has no mask");
  require(slots.dim == 1 && slots.sizes[0] == tokens, "attention_step_pages: slots are (N,)");
  require_tables(context_lens, block_tables, query_start_loc);
  const TableNumbers given_slots(slots);
  std::vector<int64_t> places(static_cast<size_t>(tokens));
  for (int64_t n = 0; n < tokens; ++n) {
    const int64_t slot = given_slots.at(n * slots.strides[0]);
    require(-1 <= slot && slot < page_count * page_size, "attention_step_pages: slots are -1 or lie in the pages");
    places[static_cast<size_t>(n)] = slot;
  }
  PagePlan plan = plan_of(tokens, page_count, page_size, TableNumbers(context_lens), TableNumbers(block_tables),
                          TableNumbers(query_start_loc), given.left, given.right, tokens, rows_of_block(in.group));
  const Buffer attended = lines(tokens * in.heads * in.value_dim * size_of(in.x.dtype));
  const DecodeCall call{in.x.dtype, in.heads, in.kv_heads, in.dim, in.value_dim, pool_of(keys), pool_of(values),
                        given.rules(1, in.heads, 1, 0), attended.get()};
  const PagedStepRows rows(decode_of(level), call, std::move(plan), page_size, std::move(places));
  require(rows.computed == tokens, "attention_step_pages: every row is a sequence's");
  stack[0] = attend_step(in, rows, attended.get(), eps, head_eps, threads, level);
}

}  // namespace

#define ATTENTION_STEP                                                                                                  \
  "Tensor x, Tensor norm, " PROJECTION("query") ", " PROJECTION("key") ", " PROJECTION("value") ", " PROJECTION("output") \
  ", Tensor query_norm, Tensor key_norm, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "

void register_decoder_step(Library& library) {
  library.define("attention_step(" ATTENTION_STEP ATTENTION_CALL
                 ", float eps, float head_eps, int first, int slot, int end, int threads, int level) -> Tensor",
                 "attention_step", attention_step);
  library.define("attention_step_pages(" ATTENTION_STEP
                 "Tensor slots, Tensor context_lens, Tensor block_tables, Tensor query_start_loc, " ATTENTION_CALL
                 ", float eps, float head_eps, int threads, int level) -> Tensor",
                 "attention_step_pages", attention_step_pages);
  library.define(
      "feed_forward_step(Tensor x, Tensor norm, " PROJECTION("gate") ", " PROJECTION("up") ", " PROJECTION("down")
      ", float eps, int activation, int threads, int level) -> Tensor",
      "feed_forward_step", feed_forward_step);
}

}  // namespace easytorch
