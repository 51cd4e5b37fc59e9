// The operators easytorch_cpu::attention_step and easytorch_cpu::feed_forward_step: a decoder layer's two halves for one
// token of each row, each one parallel region.
#include "cpu_products.h"

#include "../attention/cpu_call.h"
#include "../decode/cpu_attention.h"
#include "../glu/cpu_gate.h"
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

// x + o(attention(rotated(q(norm(x))), keys, values)): the token's key and value are written to `slot` of the cache, and the
// keys [first, end) are seen.
void attention_step(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor hidden(stack[0]), norm(stack[1]);
  const Projection to_query(stack + 2), to_key(stack + 2 + Projection::FIELDS), to_value(stack + 2 + 2 * Projection::FIELDS),
      to_output(stack + 2 + 3 * Projection::FIELDS);
  const uint64_t* const others = stack + 2 + 4 * Projection::FIELDS;
  const Tensor query_norm(others[0]), key_norm(others[1]), cos(others[2]), sin(others[3]), keys(others[4]), values(others[5]);
  const AttentionCall given(others + 6);
  const uint64_t* const after = others + 6 + AttentionCall::FIELDS;
  const double eps = number_of(after[0]), head_eps = number_of(after[1]);
  const int64_t first = static_cast<int64_t>(after[2]), slot = static_cast<int64_t>(after[3]),
                end = static_cast<int64_t>(after[4]);
  const int64_t threads = static_cast<int64_t>(after[5]), level = static_cast<int64_t>(after[6]);
  const Hidden x(hidden);
  const int32_t dtype = x.dtype;
  const int64_t batch = x.rows, size = size_of(dtype), seen = end - first;
  require(keys.dim == 4 && values.dim == 4, "attention_step: the cache is (B, K, C, D)");
  const int64_t kv_heads = keys.sizes[1], dim = keys.sizes[3], value_dim = values.sizes[3];
  require(kv_heads > 0 && dim > 0 && value_dim > 0 && to_query.weight.dim == 2 && to_query.rows() % (kv_heads * dim) == 0,
          "attention_step: heads a multiple of those of the keys are needed");
  const int64_t heads = to_query.rows() / dim, group = heads / kv_heads;
  require(heads > 0 && to_query.fits(heads * dim, x.width, hidden.dtype) &&
              to_key.fits(kv_heads * dim, x.width, hidden.dtype) &&
              to_value.fits(kv_heads * value_dim, x.width, hidden.dtype) &&
              to_output.fits(x.width, heads * value_dim, hidden.dtype),
          "attention_step: the projections do not fit");
  require(given.left == UNBOUNDED && !given.bias, "attention_step has no window and no bias");
  require(first <= slot && slot < end && threads > 0, "attention_step: the token is none of the keys, or no threads");
  const void *query_weight = weight_of(query_norm, dim, hidden), *key_weight = weight_of(key_norm, dim, hidden);
  const Angles angles(cos, sin, batch, dim, hidden);
  const DecodeCache key_cache = cache_of(keys, batch, kv_heads, dim, first, end, hidden);
  const DecodeCache value_cache = cache_of(values, batch, kv_heads, value_dim, first, end, hidden);

  const DecodeFunctions& attention = decode_of(level);
  const NormFunctions& norms = norm_of(level);
  const StepFunctions& step = step_of(level);
  const TurnFunctions& turns = turn_of(level);
  const NormalizedRows rows(x, weight_of(norm, x.width, hidden), eps, level, threads,
                            {&to_query, &to_key, &to_value});
  const PackedRows output_rows(level, batch, heads * value_dim, dtype, threads, {&to_output});
  const SkinnyPacking packing = attention.packing(dtype);
  const int64_t padded = (dim + packing.step - 1) / packing.step * packing.step, packed_size = size_of(packing.dtype);
  const Buffer query = lines(batch * heads * dim * size), key = lines(batch * kv_heads * dim * size),
              value = lines(batch * kv_heads * value_dim * size), attended = lines(batch * heads * value_dim * size),
              queries = lines(batch * heads * padded * packed_size), heads_of_threads = lines(2 * threads * dim * size);
  const int64_t chunks = (seen + CHUNK - 1) / CHUNK, splits = batch * chunks >= TASKS ? 1 : kv_heads;
  const int64_t row = attention.sums_row(value_dim), stride = batch * heads * row;
  const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(chunks * stride)]);
  const DecodeCall call{dtype, heads, kv_heads, dim, value_dim, key_cache, value_cache,
                        given.rules(batch, heads, 1, seen), attended.get()};
  Tensor y(empty(3, hidden.sizes, hidden.dtype));

  // A head of the query or of the keys: normalized where there is a weight, and rotated.
  const auto rotate = [&](const char* from, const void* weight, char* to, int64_t b, char* between) {
    char* const normalized = angles.turned > 0 ? between : to;
    if (weight != nullptr) norms.rms(from, weight, normalized, dim, dtype, static_cast<float>(head_eps));
    const char* const source = weight != nullptr ? normalized : from;
    if (angles.turned > 0) {
      turns.halves(source, angles.row(cos, b, size), angles.row(sin, b, size), to, angles.turned, dim, dtype);
    } else if (source != to) {
      memcpy(to, source, static_cast<size_t>(dim * size));
    }
  };
  // The heads that share a key/value head: queries rotated and packed, key and value written to the cache.
  const auto turn_group = [&](int64_t thread, int64_t task) {
    const int64_t b = task / kv_heads, kv = task % kv_heads;
    char* const between = heads_of_threads.get() + 2 * thread * dim * size;
    char* const turned = between + dim * size;
    for (int64_t i = 0; i < group; ++i) {
      const int64_t h = kv * group + i;
      rotate(query.get() + (b * heads + h) * dim * size, query_weight, turned, b, between);
      attention.pack(turned, 1, dtype, dim, group, packing,
                     queries.get() + ((b * heads + kv * group) * padded + i * packing.step) * packed_size);
    }
    rotate(key.get() + task * dim * size, key_weight, key_at(key_cache, b, kv, slot - first, size), b, between);
    memcpy(key_at(value_cache, b, kv, slot - first, size), value.get() + task * value_dim * size,
           static_cast<size_t>(value_dim * size));
  };
  const auto attend = [&](int64_t task) {
    const int64_t kv = task % splits, chunk = task / splits % chunks, b = task / splits / chunks, from = chunk * CHUNK;
    const DecodePart part{b, from, seen - from < CHUNK ? seen : from + CHUNK, splits == 1 ? 0 : kv,
                          splits == 1 ? kv_heads : kv + 1, group, queries.get() + b * heads * padded * packed_size,
                          sums.get() + chunk * stride + b * heads * row, nullptr, nullptr};
    attention.attend(&call, &part);
  };

  Phase projecting(to_query.tasks() + to_key.tasks() + to_value.tasks(), threads), turning(batch * kv_heads, threads),
      attending(batch * chunks * splits, threads), combining(batch * heads, threads), closing(to_output.tasks(), threads);
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
      if (task < to_query.tasks()) return project(to_query, of_query, task);
      task -= to_query.tasks();
      if (task < to_key.tasks()) return project(to_key, of_key, task);
      project(to_value, of_value, task - to_key.tasks());
    });
    turning.run(thread, [&](int64_t task) { turn_group(thread, task); });
    attending.run(thread, attend);
    combining.run(thread, [&](int64_t task) {
      attention.combine(&call, task / heads, task % heads, sums.get() + task * row, chunks, stride);
    });
    const Product to_hidden = output_rows.product(output_rows.pack(attended.get(), thread), 0, y.data);
    closing.run(thread, [&](int64_t task) { add_residual(step, to_hidden, x, to_output, task); });
  });
  stack[0] = y.release();
}

}  // namespace

void register_decoder_step(Library& library) {
  library.define(
      "attention_step(Tensor x, Tensor norm, " PROJECTION("query") ", " PROJECTION("key") ", " PROJECTION("value") ", "
      PROJECTION("output") ", Tensor query_norm, Tensor key_norm, Tensor cos, Tensor sin, "
      "Tensor(a!) keys, Tensor(b!) values, " ATTENTION_CALL ", float eps, float head_eps, int first, int slot, int end, "
      "int threads, int level) -> Tensor",
      "attention_step", attention_step);
  library.define(
      "feed_forward_step(Tensor x, Tensor norm, " PROJECTION("gate") ", " PROJECTION("up") ", " PROJECTION("down")
      ", float eps, int activation, int threads, int level) -> Tensor",
      "feed_forward_step", feed_forward_step);
}

}  // namespace easytorch
