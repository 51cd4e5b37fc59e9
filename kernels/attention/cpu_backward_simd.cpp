// The gradients of attention of many query tokens, block by block of recomputed scores (arXiv:2307.08691).
#include "cpu_flash_backward.h"

#include <math.h>

#include "../cpu/functions.h"
#include "cpu_features.h"
#include "cpu_units.h"

namespace {

// Keys and queries of a block. Its scores are transposed, (KEYS, QUERIES): what a query has one of then lies along a row.
constexpr int64_t KEYS = 96, QUERIES = 64;

// How the memory of a task is laid out, in bytes, for units of a kind.
template <class Units>
struct Memory {
  static constexpr int64_t WEIGHTS_ROW = QUERIES / Units::NUMBERS * UNIT;  // of weights, and their gradients
  static constexpr int64_t KEY_UNITS = KEYS / Units::NUMBERS;
  int64_t queries, key_blocks;              // up to whole blocks
  int64_t dim, value_dim, columns;          // up to whole vectors; and that up to ROWS
  int64_t query_panel, grad_panel;          // of WIDTH queries
  int64_t units_panel;                      // of WIDTH numbers of all queries
  int64_t key_row, value_row;               // of a key
  char *key_rows, *value_rows, *key_columns;                        // of all keys
  char *query_panels, *grad_panels, *query_units, *grad_units;      // of a head
  float *grad_query, *grad_keys, *grad_values;                      // (columns, queries), (keys, dim), (keys, value_dim)
  float *minus_maximum, *minus_log_sum, *minus_delta;               // of a head
  float *scores, *gradients, *slopes;                               // of a block
  float* bias;  // of a block, then the gradients of its biased scores; null without a bias
  char *weights, *score_grads, *pairs;                              // the same as units
  int64_t bytes;

  Memory(const FlashCall& c, char* start) {
    queries = up_to(c.length, QUERIES), key_blocks = (c.keys + KEYS - 1) / KEYS;
    dim = up_to(c.dim, WIDTH), value_dim = up_to(c.value_dim, WIDTH), columns = up_to(dim, ROWS);
    query_panel = panel_of_rows<Units>(c.dim), grad_panel = panel_of_rows<Units>(c.value_dim);
    units_panel = queries / Units::NUMBERS * PANEL;
    key_row = units_of<Units>(c.dim) * UNIT, value_row = units_of<Units>(c.value_dim) * UNIT;
    const int64_t keys = key_blocks * KEYS, vectors = queries / WIDTH, block = KEYS * QUERIES * 4;
    char* p = start;
    const auto take = [&p](int64_t size) {
      char* const taken = p;
      p += up_to(size, 64);
      return taken;
    };
    const auto floats = [&take](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
    key_rows = take(keys * key_row), value_rows = take(keys * value_row);
    key_columns = take(key_blocks * column_block());
    query_panels = take(vectors * query_panel), grad_panels = take(vectors * grad_panel);
    query_units = take(dim / WIDTH * units_panel), grad_units = take(value_dim / WIDTH * units_panel);
    grad_query = floats(columns * queries), grad_keys = floats(keys * dim), grad_values = floats(keys * value_dim);
    minus_maximum = floats(queries), minus_log_sum = floats(queries), minus_delta = floats(queries);
    scores = floats(KEYS * QUERIES), gradients = floats(KEYS * QUERIES), slopes = floats(KEYS * QUERIES);
    bias = c.rules.bias.data == nullptr ? nullptr : floats(KEYS * QUERIES);
    weights = reinterpret_cast<char*>(scores), score_grads = pairs = reinterpret_cast<char*>(gradients);
    if (Units::NUMBERS > 1) weights = take(block / 2), score_grads = take(block / 2), pairs = take(block / 2);
    // to pack a panel of rows, or a block of keys
    packing = take(query_panel > grad_panel ? query_panel : grad_panel);
    blocks = take(dim / WIDTH * KEY_UNITS * PANEL);
    bytes = p - start;
  }
  char *packing, *blocks;
  int64_t column_block() const { return columns * KEY_UNITS * UNIT; }
};

RowsOf rows_of(const FlashTensor& t, int64_t b, int64_t head, int64_t count, int64_t numbers, int32_t dtype) {
  return {t.data, b * t.of_batch + head * t.of_head, t.of_row, count, numbers, dtype};
}

// Keys and values of a (b, kv head), as rows, and the keys transposed block by block.
template <class Units>
void pack_keys(const FlashCall& c, int64_t b, int64_t kv, const Memory<Units>& m) {
  const RowsOf key = rows_of(c.key, b, kv, c.keys, c.dim, c.dtype);
  const RowsOf value = rows_of(c.value, b, kv, c.keys, c.value_dim, c.dtype);
  const int64_t keys = m.key_blocks * KEYS, panel = m.KEY_UNITS * PANEL, row = m.KEY_UNITS * UNIT;
  pack_rows<Units>(key, 0, keys, m.key_rows, m.key_row);
  pack_rows<Units>(value, 0, keys, m.value_rows, m.value_row);
  for (int64_t block = 0; block < m.key_blocks; ++block) {
    pack_panels_of_numbers<Units>(key, block * KEYS, KEYS, m.blocks, panel);
    char* const to = m.key_columns + block * m.column_block();
    for (int64_t d = 0; d < m.dim; d += WIDTH) {
      for (int64_t u = 0; u < m.KEY_UNITS; u += WIDTH) {
        transpose(m.blocks + d / WIDTH * panel + u * PANEL, PANEL, to + d * row + u * UNIT, row);
      }
    }
    memset(to + m.dim * row, 0, static_cast<size_t>((m.columns - m.dim) * row));
  }
}

// Queries of head h and the gradients of their outputs, both ways, and what softmax kept of them.
template <class Units>
void pack_queries(const FlashGradientCall& g, int64_t b, int64_t h, const Memory<Units>& m) {
  const FlashCall& c = g.call;
  const RowsOf query = rows_of(c.query, b, h, c.length, c.dim, c.dtype);
  const RowsOf grad = rows_of(g.grad, b, h, c.length, c.value_dim, c.dtype);
  const RowsOf output = rows_of(g.output, b, h, c.length, c.value_dim, c.dtype);
  pack_panels_of_rows<Units>(query, m.queries, m.query_panels, m.packing);
  pack_panels_of_rows<Units>(grad, m.queries, m.grad_panels, m.packing);
  pack_panels_of_numbers<Units>(query, 0, m.queries, m.query_units, m.units_panel);
  pack_panels_of_numbers<Units>(grad, 0, m.queries, m.grad_units, m.units_panel);
  const float *maximum = g.logsumexp + (b * c.heads + h) * 2 * c.length, *log_sum = maximum + c.length;
  for (int64_t i = 0; i < m.queries; ++i) {
    Floats total = zeros();
    for (int64_t d = 0; d < c.value_dim && i < c.length; d += WIDTH) {
      const int64_t count = c.value_dim - d;
      total = multiply_add(read_vector(number_at(grad.at(i), d, c.dtype), count, c.dtype),
                           read_vector(number_at(output.at(i), d, c.dtype), count, c.dtype), total);
    }
    m.minus_delta[i] = -sum(total);
    m.minus_maximum[i] = i < c.length ? -maximum[i] : 0.0f;
    m.minus_log_sum[i] = i < c.length ? -log_sum[i] : -INFINITY;
  }
  memset(m.grad_query, 0, static_cast<size_t>(m.columns * m.queries) * sizeof(float));
}

// A block of scores: keys [key, key + keys) of (b, h) for queries [query, query + queries).
struct Block {
  int64_t b, h, key, keys, query, queries;
  bool as_they_are;  // the scores are only scaled, and each is seen
  bool one_segment;  // no segment hides one of them
};

// The bias of a block, a row for each key, to `bias`.
void read_bias(const FlashCall& c, const Block& at, float* bias) {
  const ScoreMatrix& from = c.rules.bias;
  const int32_t dtype = c.rules.bias_dtype;
  float some[WIDTH * WIDTH];
  for (int64_t i = 0; i < at.queries; i += WIDTH) {
    for (int64_t k = 0; k < at.keys; k += WIDTH) {
      const int64_t first = place_of(from, at.b, at.h, at.query + i, at.key + k), count = at.keys - k;
      for (int64_t r = 0; r < WIDTH; ++r) {
        const int64_t row = first + (i + r < at.queries ? r : 0) * from.of_row;
        if (from.of_column == 1) {
          store(some + r * WIDTH, read_vector(number_at(from.data, row, dtype), count, dtype));
        } else {
          for (int64_t n = 0; n < WIDTH; ++n) {
            some[r * WIDTH + n] = load_number(from.data, row + (n < count ? n : 0) * from.of_column, dtype);
          }
        }
      }
      transpose(reinterpret_cast<const char*>(some), PANEL, reinterpret_cast<char*>(bias + k * QUERIES + i), QUERIES * UNIT);
    }
  }
}

// Adds the gradients of a block's biased scores, a row for each key, to that of the bias; to: of the head.
void add_bias_gradient(const FlashGradientCall& g, const Block& at, const float* grads, float* to) {
  if (g.bias_of_row == 0) {  // one for all queries
    for (int64_t k = 0; k < at.keys; ++k) {
      Floats total = zeros();
      for (int64_t i = 0; i < QUERIES; i += WIDTH) total = add(total, load(grads + k * QUERIES + i));
      to[at.key + k] += sum(total);
    }
    return;
  }
  float some[WIDTH * WIDTH];
  for (int64_t i = 0; i < at.queries; i += WIDTH) {
    for (int64_t k = 0; k < at.keys; k += WIDTH) {
      transpose(reinterpret_cast<const char*>(grads + k * QUERIES + i), QUERIES * UNIT, reinterpret_cast<char*>(some), PANEL);
      for (int64_t r = 0; r < WIDTH && i + r < at.queries; ++r) {
        float* const row = to + (at.query + i + r) * g.bias_of_row + at.key + k;
        const Floats before = read_some<NumbersFloat32>(row, at.keys - k);
        write_some<NumbersFloat32>(row, at.keys - k, add(before, load(some + r * WIDTH)));
      }
    }
  }
}

// The products of key `j` become scores, those that are hidden HIDDEN; slopes: the derivatives of the cap; bias: the
// key's, or null.
void scores_of_key(const FlashCall& c, const Block& at, int64_t j, float* scores, float* slopes, const float* bias) {
  const ScoreRules& rules = c.rules;
  const Floats scale = broadcast(rules.scale), cap = broadcast(rules.softcap), one = broadcast(1.0f);
  for (int64_t i = 0; i < QUERIES; i += WIDTH) {
    Floats s = multiply(load(scores + i), scale);
    if (rules.softcap > 0.0f) {
      const Floats t = hyperbolic_tangent(divide(s, cap));
      store(slopes + i, multiply_add(multiply(t, broadcast(-1.0f)), t, one));
      s = multiply(t, cap);
    }
    store(scores + i, bias == nullptr || i >= at.queries ? s : add(s, load(bias + i)));
  }
  if (rules.mask.data != nullptr) {
    const uint8_t* mask = static_cast<const uint8_t*>(rules.mask.data) + place_of(rules.mask, at.b, at.h, at.query, j);
    for (int64_t i = 0; i < at.queries; ++i) scores[i] = mask[i * rules.mask.of_row] != 0 ? scores[i] : HIDDEN;
  }
  for (int64_t i = 0; i < at.queries && !at.one_segment; ++i) {
    scores[i] = same_segment(c, at.b, at.query + i, j) ? scores[i] : HIDDEN;
  }
  // the queries that see the key
  const int64_t diagonal = j - (c.keys - c.length) - at.query, first = diagonal - c.right, end = diagonal + c.left + 1;
  for (int64_t i = 0; i < first && i < QUERIES; ++i) scores[i] = HIDDEN;
  for (int64_t i = end < 0 ? 0 : end; i < QUERIES; ++i) scores[i] = HIDDEN;
}

// Products of keys and queries, and of values and gradients, become weights and the gradients of the scores.
template <class Units>
void weigh(const FlashCall& c, const Block& at, int64_t rows, bool wants_bias, const Memory<Units>& m) {
  const bool capped = c.rules.softcap > 0.0f;
  if (m.bias != nullptr) read_bias(c, at, m.bias);
  // In a loop of its own, as in the forward: rounded with the difference at once, equal scores that are large would differ
  // from their maximum.
  const Floats scale = broadcast(c.rules.scale);
  for (int64_t place = 0; place < rows * QUERIES && at.as_they_are; place += WIDTH) {
    store(m.scores + place, multiply(load(m.scores + place), scale));
  }
  Words hashes[QUERIES / WIDTH];
  for (int64_t i = 0; i < QUERIES && c.kept != 0.0f; i += WIDTH) {
    hashes[i / WIDTH] = hash_of_query(hash_of_head(c, at.b, at.h), counted_from(static_cast<uint32_t>(at.query + i)));
  }
  for (int64_t j = 0; j < rows; j += Units::NUMBERS) {
    for (int64_t k = j; k < j + Units::NUMBERS && !at.as_they_are; ++k) {
      float* const scores = m.scores + k * QUERIES;
      if (k < at.keys) {
        scores_of_key(c, at, at.key + k, scores, m.slopes + k * QUERIES, m.bias == nullptr ? nullptr : m.bias + k * QUERIES);
      } else {  // they only fill up
        for (int64_t i = 0; i < QUERIES; ++i) scores[i] = HIDDEN, m.slopes[k * QUERIES + i] = 0.0f;
      }
    }
    for (int64_t i = 0; i < QUERIES; i += WIDTH) {
      const Floats most = load(m.minus_maximum + at.query + i), log_sum = load(m.minus_log_sum + at.query + i);
      const Floats delta = load(m.minus_delta + at.query + i);
      Floats grads[Units::NUMBERS];
#pragma GCC unroll 2
      for (int n = 0; n < Units::NUMBERS; ++n) {
        const int64_t place = (j + n) * QUERIES + i;
        const Floats weight = exponential(add(add(load(m.scores + place), most), log_sum));
        Floats used = weight, gradient = load(m.gradients + place);
        if (c.kept != 0.0f) {
          const Floats factor = kept(c, hashes[i / WIDTH], words(static_cast<uint32_t>(at.key + j + n)));
          used = multiply(weight, factor), gradient = multiply(gradient, factor);
        }
        grads[n] = multiply(weight, add(gradient, delta));
        if (wants_bias) store(m.bias + place, grads[n]);
        if (capped) grads[n] = multiply(grads[n], load(m.slopes + place));
        Units::write(m.weights + (j + n) * m.WEIGHTS_ROW + i / Units::NUMBERS * UNIT, used);
        Units::write(m.score_grads + (j + n) * m.WEIGHTS_ROW + i / Units::NUMBERS * UNIT, grads[n]);
      }
      if constexpr (Units::NUMBERS > 1) {
        Units::write_pairs(m.pairs + (j / Units::NUMBERS * QUERIES + i) * UNIT, grads[0], grads[1]);
      }
    }
  }
}

// Adds what the block gives to the gradients of its queries, keys and values.
template <class Units>
void add_block(const FlashGradientCall& g, const Block& at, float* bias, const Memory<Units>& m) {
  const FlashCall& c = g.call;
  const bool wants_bias = g.wants_bias && g.bias_of_column != 0;
  const int64_t rows = up_to(at.keys, ROWS), units = at.query / Units::NUMBERS, vectors = QUERIES / WIDTH;
  const int64_t panels = at.query / WIDTH, width = m.dim / WIDTH, value_width = m.value_dim / WIDTH;
  multiply_rows<Units>(m.key_rows + at.key * m.key_row, m.key_row, rows, m.query_panels + panels * m.query_panel,
                       m.query_panel, PANEL, vectors, m.key_row / UNIT, m.scores, QUERIES, false);
  multiply_rows<Units>(m.value_rows + at.key * m.value_row, m.value_row, rows, m.grad_panels + panels * m.grad_panel,
                       m.grad_panel, PANEL, vectors, m.value_row / UNIT, m.gradients, QUERIES, false);
  weigh<Units>(c, at, rows, wants_bias, m);
  if (wants_bias) add_bias_gradient(g, at, m.bias, bias);
  multiply_rows<Units>(m.weights, m.WEIGHTS_ROW, rows, m.grad_units + units * PANEL, m.units_panel, PANEL, value_width,
                       QUERIES / Units::NUMBERS, m.grad_values + at.key * m.value_dim, m.value_dim, true);
  multiply_rows<Units>(m.score_grads, m.WEIGHTS_ROW, rows, m.query_units + units * PANEL, m.units_panel, PANEL, width,
                       QUERIES / Units::NUMBERS, m.grad_keys + at.key * m.dim, m.dim, true);
  multiply_rows<Units>(m.key_columns + at.key / KEYS * m.column_block(), m.KEY_UNITS * UNIT, m.columns, m.pairs, PANEL,
                       QUERIES * UNIT, vectors, units_of<Units>(rows), m.grad_query + at.query, m.queries, true);
}

// A row of gradients, scaled; all vectors of `row` are overwritten.
void write_scaled(void* to, int64_t first, int64_t count, int32_t dtype, float* row, float factor) {
  const Floats factors = broadcast(factor);
  for (int64_t d = 0; d < count; d += WIDTH) store(row + d, multiply(load(row + d), factors));
  write_row(number_at(to, first, dtype), count, dtype, row);
}

template <class Units>
void finish_head(const FlashGradientCall& g, int64_t b, int64_t h, float* bias, const Memory<Units>& m) {
  const FlashCall& c = g.call;
  float* const rows = m.scores;  // WIDTH queries at a time, as many numbers of each as fit
  for (int64_t i = 0; i < c.length; i += WIDTH) {
    for (int64_t d = 0; d < m.dim; d += QUERIES) {
      const int64_t some = m.dim - d < QUERIES ? m.dim - d : QUERIES;
      for (int64_t k = 0; k < some; k += WIDTH) {
        transpose(reinterpret_cast<const char*>(m.grad_query + (d + k) * m.queries + i), m.queries * UNIT,
                  reinterpret_cast<char*>(rows + k), QUERIES * UNIT);
      }
      for (int64_t row = i; row < c.length && row < i + WIDTH; ++row) {
        const int64_t first = ((b * c.length + row) * c.heads + h) * c.dim + d, count = c.dim - d < some ? c.dim - d : some;
        write_scaled(g.grad_query, first, count, c.dtype, rows + (row - i) * QUERIES, c.rules.scale);
      }
    }
  }
  if (c.rules.sinks == nullptr) return;
  // a sink's weight has no value: its score has the gradient weight * (0 - delta)
  const Floats sink = broadcast(sink_of(c.rules, h));
  Floats total = zeros();
  for (int64_t i = 0; i < m.queries; i += WIDTH) {
    const Floats weight = exponential(add(add(sink, load(m.minus_maximum + i)), load(m.minus_log_sum + i)));
    total = multiply_add(weight, load(m.minus_delta + i), total);
  }
  g.grad_sinks[b * c.heads + h] = sum(total);
  if (!g.wants_bias || g.bias_of_column != 0) return;
  // The weights of a row's keys add up to 1 but for the sink's, and their gradients, weighed, to delta: what the row's
  // bias is given is the sink's weight of delta, and 0 without sinks. As a sum over the keys it would be their rounding.
  for (int64_t i = 0; i < c.length; ++i) {
    bias[i * g.bias_of_row] -= expf(sink_of(c.rules, h) + m.minus_maximum[i] + m.minus_log_sum[i]) * m.minus_delta[i];
  }
}

template <class Units>
int64_t scratch_as(const FlashGradientCall& g) {
  return Memory<Units>(g.call, nullptr).bytes;
}

template <class Units>
void run_as(const FlashGradientCall& g, int64_t b, int64_t kv, float* bias, char* scratch) {
  const FlashCall& c = g.call;
  const Memory<Units> m(c, scratch);
  const int64_t group = c.heads / c.kv_heads, shift = c.keys - c.length;
  memset(m.grad_keys, 0, static_cast<size_t>(m.key_blocks * KEYS * m.dim) * sizeof(float));
  memset(m.grad_values, 0, static_cast<size_t>(m.key_blocks * KEYS * m.value_dim) * sizeof(float));
  pack_keys<Units>(c, b, kv, m);
  const bool only_scale = !(c.rules.softcap > 0.0f) && c.rules.bias.data == nullptr && c.rules.mask.data == nullptr;
  for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
    pack_queries<Units>(g, b, h, m);
    float* const of_head = bias == nullptr ? nullptr : bias + (h - kv * group) * g.bias_of_head;
    for (int64_t key = 0; key < c.keys; key += KEYS) {
      const int64_t keys = c.keys - key < KEYS ? c.keys - key : KEYS;
      // the queries that see one of the keys
      const int64_t first = key - shift - c.right, end = key + keys - shift + c.left;
      const int64_t begin = first < 0 ? 0 : first / QUERIES * QUERIES;
      for (int64_t query = begin; query < c.length && query < end; query += QUERIES) {
        const int64_t queries = c.length - query < QUERIES ? c.length - query : QUERIES;
        const Reach reach = reach_of(c, b, query, queries, key, keys);
        if (!reach.some) continue;
        const bool seen = reach.all && keys == KEYS && query + shift + c.right >= key + keys - 1 &&
                          query + queries - 1 + shift - c.left <= key;
        add_block<Units>(g, {b, h, key, keys, query, queries, only_scale && seen, reach.all}, of_head, m);
      }
    }
    finish_head<Units>(g, b, h, of_head, m);
  }
  for (int64_t j = 0; j < c.keys; ++j) {
    const int64_t row = (b * c.keys + j) * c.kv_heads + kv;
    write_scaled(g.grad_key, row * c.dim, c.dim, c.dtype, m.grad_keys + j * m.dim, c.rules.scale);
    write_row(number_at(g.grad_value, row * c.value_dim, c.dtype), c.value_dim, c.dtype, m.grad_values + j * m.value_dim);
  }
}

#if defined(__AVX512BF16__)
#define BY_DTYPE(function, ...)                                                     \
  return g->call.dtype == BFLOAT16 ? function<UnitsBFloat16>(*g, ##__VA_ARGS__) \
                                   : function<UnitsFloat32>(*g, ##__VA_ARGS__)
#else
#define BY_DTYPE(function, ...) return function<UnitsFloat32>(*g, ##__VA_ARGS__)
#endif

int64_t scratch(const FlashGradientCall* g) { BY_DTYPE(scratch_as); }
void run(const FlashGradientCall* g, int64_t b, int64_t kv, float* bias, char* scratch) {
  BY_DTYPE(run_as, b, kv, bias, scratch);
}

}  // namespace

extern const FlashGradient EASYTORCH_NAME(flash_gradient);
const FlashGradient EASYTORCH_NAME(flash_gradient) = {scratch, run};
