// A decoder layer's attention with its norm and residual, for one token of each row, over a cache or over pages: one
// parallel region.
#pragma once

#include "../attention/cpu_call.h"
#include "../decode/cpu_attention.h"
#include "../ragged_page/cpu_pages.h"
#include "../rotary/cpu_turn.h"
#include "cpu_hidden.h"

EASYTORCH_TABLE(DecodeFunctions, decode)
EASYTORCH_TABLE(TurnFunctions, turn)

namespace easytorch {
namespace {

// Keys that are one task of attention, and tasks from which heads are no tasks of their own: as in decode's operator.
constexpr int64_t CHUNK = 256, TASKS = 64;

// The tables of the rotation, (B or 1, 1, R); R is 0 for none.
struct Rotation {
  template <class Reader>
  explicit Rotation(Reader& from) : cos(from.tensor()), sin(from.tensor()) {}
  const Tensor cos, sin;
};

// Its rows, for heads of `dim` numbers.
struct Angles {
  Angles(const Rotation& tables, int64_t batch, int64_t dim, const Tensor& x) : cos(tables.cos), sin(tables.sin) {
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

// norm (D,); query (H * Dk, D), key (K * Dk, D), value (K * Dv, D), output (D, H * Dv); query_norm and key_norm (Dk,) or, for
// none, (0,).
struct AttentionWeights {
  template <class Reader>
  explicit AttentionWeights(Reader& from)
      : norm(from.tensor()), to_query(from), to_key(from), to_value(from), to_output(from), query_norm(from.tensor()),
        key_norm(from.tensor()), eps(from.number()), head_eps(from.number()) {}

  const Tensor norm;
  const Projection to_query, to_key, to_value, to_output;
  const Tensor query_norm, key_norm;
  const double eps, head_eps;
};

struct AttentionSizes {
  int64_t kv_heads, dim, value_dim;
};

// Hidden states and the weights of their attention, which fit keys and values of these sizes. The call is looked at too.
struct AttentionInputs {
  AttentionInputs(const Tensor& hidden, const AttentionWeights& weights, const Rotation& rotation, AttentionSizes sizes,
                   const AttentionCall& given, int64_t threads)
      : hidden(hidden), weights(weights), rotation(rotation), x(hidden), kv_heads(sizes.kv_heads), dim(sizes.dim),
        value_dim(sizes.value_dim) {
    const Projection &to_query = weights.to_query, &to_key = weights.to_key, &to_value = weights.to_value;
    require(kv_heads > 0 && dim > 0 && value_dim > 0 && to_query.weight.dim == 2 &&
                to_query.rows() % (kv_heads * dim) == 0,
            "attention_step: heads a multiple of those of the keys are needed");
    heads = to_query.rows() / dim, group = heads / kv_heads;
    require(heads > 0 && to_query.fits(heads * dim, x.width, hidden.dtype) &&
                to_key.fits(kv_heads * dim, x.width, hidden.dtype) &&
                to_value.fits(kv_heads * value_dim, x.width, hidden.dtype) &&
                weights.to_output.fits(x.width, heads * value_dim, hidden.dtype),
            "attention_step: the projections do not fit");
    require(!given.bias && threads > 0, "attention_step has no bias, and takes threads");
  }

  const Tensor& hidden;
  const AttentionWeights& weights;
  const Rotation& rotation;
  const Hidden x;
  int64_t heads = 0, kv_heads, dim, value_dim, group = 0;
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
uint64_t attend_step(const AttentionInputs& in, const Rows& over, char* attended, const Run& how) {
  const int64_t threads = how.threads, level = how.level;
  const double head_eps = in.weights.head_eps;
  const Hidden& x = in.x;
  const int32_t dtype = x.dtype;
  const int64_t batch = x.rows, size = size_of(dtype), heads = in.heads, kv_heads = in.kv_heads, dim = in.dim,
                value_dim = in.value_dim, group = in.group;
  const void *query_weight = weight_of(in.weights.query_norm, dim, in.hidden),
             *key_weight = weight_of(in.weights.key_norm, dim, in.hidden);
  const Angles angles(in.rotation, batch, dim, in.hidden);
  const NormFunctions& norms = norm_of(level);
  const StepFunctions& step = step_of(level);
  const TurnFunctions& turns = turn_of(level);
  const NormalizedRows rows(x, weight_of(in.weights.norm, x.width, in.hidden), in.weights.eps, level, threads,
                            {&in.weights.to_query, &in.weights.to_key, &in.weights.to_value});
  const PackedRows output_rows(level, batch, heads * value_dim, dtype, threads, {&in.weights.to_output});
  const Buffer query = lines(batch * heads * dim * size), key = lines(batch * kv_heads * dim * size),
              value = lines(batch * kv_heads * value_dim * size), heads_of_threads = lines(2 * threads * dim * size);
  Tensor y(empty(3, in.hidden.sizes, in.hidden.dtype));

  // A head of the query or of the keys: normalized where there is a weight, and rotated.
  const auto rotate = [&](const char* from, const void* weight, char* to, int64_t b, char* between) {
    char* const normalized = angles.turned > 0 ? between : to;
    if (weight != nullptr) norms.rms(from, weight, normalized, dim, dtype, static_cast<float>(head_eps));
    const char* const source = weight != nullptr ? normalized : from;
    if (angles.turned > 0) {
      turns.halves(source, angles.row(angles.cos, b, size), angles.row(angles.sin, b, size), to, angles.turned, dim, dtype);
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

  Phase projecting(in.weights.to_query.tasks() + in.weights.to_key.tasks() + in.weights.to_value.tasks(), threads),
      turning(batch * kv_heads, threads), attending(over.tasks(), threads), combining(batch * heads, threads),
      closing(in.weights.to_output.tasks(), threads);
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
      if (task < in.weights.to_query.tasks()) return project(in.weights.to_query, of_query, task);
      task -= in.weights.to_query.tasks();
      if (task < in.weights.to_key.tasks()) return project(in.weights.to_key, of_key, task);
      project(in.weights.to_value, of_value, task - in.weights.to_key.tasks());
    });
    turning.run(thread, [&](int64_t task) { turn_group(thread, task); });
    attending.run(thread, [&](int64_t task) { over.attend(task, nullptr); });
    combining.run(thread, [&](int64_t task) { over.combine(task / heads, task % heads); });
    const Product to_hidden = output_rows.product(output_rows.pack(attended, thread), 0, y.data);
    closing.run(thread, [&](int64_t task) { add_residual(step, to_hidden, x, in.weights.to_output, task); });
  });
  return y.release();
}

// Where a token's key and value go in a cache, and the keys [first, end) that it sees.
struct Place {
  template <class Reader>
  explicit Place(Reader& from) : first(from.integer()), slot(from.integer()), end(from.integer()) {}
  int64_t first, slot, end;
};

// Over a cache (B, K, C, D).
uint64_t attend_dense(const Tensor& hidden, const AttentionWeights& weights, const Rotation& rotation, const Tensor& keys,
                      const Tensor& values, const AttentionCall& given, const Place& place, const Run& how) {
  const int64_t first = place.first, slot = place.slot, end = place.end;
  require(keys.dim == 4 && values.dim == 4, "attention_step: the cache is (B, K, C, D)");
  const AttentionInputs in(hidden, weights, rotation, {keys.sizes[1], keys.sizes[3], values.sizes[3]}, given, how.threads);
  const int64_t batch = in.x.rows, seen = end - first;
  require(given.left == UNBOUNDED, "attention_step has no window: `first` is given");
  require(first <= slot && slot < end, "attention_step: the token is none of the keys");
  const DecodeCache key_cache = cache_of(keys, batch, in.kv_heads, in.dim, first, end, in.hidden);
  const DecodeCache value_cache = cache_of(values, batch, in.kv_heads, in.value_dim, first, end, in.hidden);
  const Buffer attended = lines(batch * in.heads * in.value_dim * size_of(in.x.dtype));
  const DecodeCall call{in.x.dtype, in.heads, in.kv_heads, in.dim, in.value_dim, key_cache, value_cache,
                        given.rules(batch, in.heads, 1, seen), attended.get()};
  const DenseRows rows(decode_of(how.level), call, batch, seen, slot - first);
  return attend_step(in, rows, attended.get(), how);
}

// Pages of keys and values, where each row's go, and the tables of the sequences.
struct PagesOfTokens {
  template <class Reader>
  explicit PagesOfTokens(Reader& from)
      : keys(from.tensor()), values(from.tensor()), slots(from.tensor()), context_lens(from.tensor()),
        block_tables(from.tensor()), query_start_loc(from.tensor()) {}

  const Tensor keys, values, slots, context_lens, block_tables, query_start_loc;
};

// Over pages (P, size, K, D): row n's key and value are written to slots[n], page * size + offset, -1 for none, before any
// row attends; what a row sees is what ragged_page's tables and the window say. Every row is a sequence's.
uint64_t attend_pages(const Tensor& hidden, const AttentionWeights& weights, const Rotation& rotation,
                      const PagesOfTokens& pages, const AttentionCall& given, const Run& how) {
  const Tensor &keys = pages.keys, &values = pages.values, &slots = pages.slots;
  const Hidden x(hidden);
  const int64_t tokens = x.rows;
  require(keys.dim == 4 && values.dim == 4 && keys.dtype == hidden.dtype && values.dtype == hidden.dtype,
          "attention_step_pages: the pages are (P, size, K, D), of the dtype of the hidden states");
  const int64_t page_count = keys.sizes[0], page_size = keys.sizes[1];
  require(page_size > 0 && values.sizes[0] == page_count && values.sizes[1] == page_size && values.sizes[2] == keys.sizes[2],
          "attention_step_pages: key_pages and value_pages do not fit");
  const AttentionInputs in(hidden, weights, rotation, {keys.sizes[2], keys.sizes[3], values.sizes[3]}, given, how.threads);
  require(!given.mask, "attention_step_pages has no mask");
  require(slots.dim == 1 && slots.sizes[0] == tokens, "attention_step_pages: slots are (N,)");
  require_tables(pages.context_lens, pages.block_tables, pages.query_start_loc);
  const TableNumbers given_slots(slots);
  std::vector<int64_t> places(static_cast<size_t>(tokens));
  for (int64_t n = 0; n < tokens; ++n) {
    const int64_t slot = given_slots.at(n * slots.strides[0]);
    require(-1 <= slot && slot < page_count * page_size, "attention_step_pages: slots are -1 or lie in the pages");
    places[static_cast<size_t>(n)] = slot;
  }
  PagePlan plan = plan_of(tokens, page_count, page_size, TableNumbers(pages.context_lens), TableNumbers(pages.block_tables),
                          TableNumbers(pages.query_start_loc), given.left, given.right, tokens, rows_of_block(in.group));
  const Buffer attended = lines(tokens * in.heads * in.value_dim * size_of(in.x.dtype));
  const DecodeCall call{in.x.dtype, in.heads, in.kv_heads, in.dim, in.value_dim, pool_of(keys), pool_of(values),
                        given.rules(1, in.heads, 1, 0), attended.get()};
  const PagedStepRows rows(decode_of(how.level), call, std::move(plan), page_size, std::move(places));
  require(rows.computed == tokens, "attention_step_pages: every row is a sequence's");
  return attend_step(in, rows, attended.get(), how);
}

}  // namespace
}  // namespace easytorch
