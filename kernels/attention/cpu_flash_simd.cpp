// Attention of many query tokens: tiles of scores by products in registers, softmax as the keys come (arXiv:2205.14135).
#include "cpu_flash.h"

#include <math.h>

#include "../cpu/functions.h"
#include "cpu_features.h"
#include "cpu_units.h"

namespace {

// Queries of a task, and keys whose scores are computed at once: these scores, which their weights replace, and 256 keys and
// values of 128 numbers fit the L2 cache. Measured on one thread of an Intel Xeon (Emerald Rapids), T1024 D64 and T4096 D128,
// causal, float32, GF/s of what causality leaves: 48 x 128 115 and 133, 48 x 256 127 and 141, 96 x 256 125 and 147.
constexpr int QUERIES = 96, KEYS = 256;

// How a call is laid out for units of a kind. A panel has WIDTH keys (or numbers of a value) side by side for each unit.
template <class Units>
struct Layout {
  int64_t key_units, key_panel;  // units of a head; bytes of WIDTH keys
  int64_t value_panels, padded_keys;  // panels of a value; keys, up to whole panels
  explicit Layout(const FlashCall& c)
      : key_units(units_of<Units>(c.dim)), key_panel(panel_of_rows<Units>(c.dim)),
        value_panels((c.value_dim + WIDTH - 1) / WIDTH), padded_keys(up_to(c.keys, WIDTH)) {}
  int64_t key_bytes() const { return padded_keys / WIDTH * key_panel; }
  int64_t value_panel_bytes() const { return padded_keys / Units::NUMBERS * PANEL; }
  int64_t value_bytes() const { return value_panels * value_panel_bytes(); }
  int64_t value_width() const { return value_panels * WIDTH; }
  int64_t query_row() const { return key_units * UNIT; }
};
// The bytes of one row of scores, whose weights begin where they did.
constexpr int64_t SCORES_ROW = KEYS * UNIT;

template <class Units>
FlashSizes sizes_as(const FlashCall& c) {
  const Layout<Units> l(c);
  const int64_t scratch = QUERIES * (l.query_row() + SCORES_ROW + 4 * l.value_width());
  return {QUERIES, l.key_bytes(), l.value_bytes(), scratch, l.key_panel};
}

template <class Units>
void pack_as(const FlashCall& c, int64_t b, int64_t kv, char* scratch) {
  const Layout<Units> l(c);
  char* keys = c.keys_memory + (b * c.kv_heads + kv - c.first_pair) * l.key_bytes();
  char* values = c.values_memory + (b * c.kv_heads + kv - c.first_pair) * l.value_bytes();
  const RowsOf key{c.key.data, b * c.key.of_batch + kv * c.key.of_head, c.key.of_row, c.keys, c.dim, c.dtype};
  const RowsOf value{c.value.data, b * c.value.of_batch + kv * c.value.of_head, c.value.of_row, c.keys, c.value_dim, c.dtype};
  pack_panels_of_rows<Units>(key, l.padded_keys, keys, scratch);
  pack_panels_of_numbers<Units>(value, 0, l.padded_keys, values, l.value_panel_bytes());
}

// A row's softmax so far: its largest score, and the sum of exp(score - largest).
struct Softmax {
  float largest, sum;
};

// Scores of query i for keys [from, from + count) become weights exp(score - largest); what the values so far are to be
// multiplied by is returned. seen: the first key that the query sees and that after its last.
template <class Units>
inline float weigh(const FlashCall& c, int64_t b, int64_t h, int64_t i, int64_t from, int64_t count,
                   const int64_t* seen, float* scores, char* weights, Softmax& state) {
  const int64_t padded = up_to(count, WIDTH);
  const bool scale_later = only_scaled(c.rules);
  if (!scale_later) apply_rules(c.rules, b, h, i, from, count, padded, scores);
  hide(c.rules, b, h, i, from, count, scores);
  if (c.key_ids != nullptr) {
    const int64_t own = c.query_ids[b * c.length + i], *ids = c.key_ids + b * c.keys + from;
    for (int64_t j = 0; j < count; ++j) scores[j] = ids[j] == own ? scores[j] : HIDDEN;
  }
  const int64_t first = seen[0] - from, end = seen[1] - from;
  for (int64_t j = 0; j < padded && j < first; ++j) scores[j] = HIDDEN;
  for (int64_t j = end < 0 ? 0 : end; j < padded; ++j) scores[j] = HIDDEN;
  // Stored once they are multiplied, so that no compiler rounds product and difference at once: the largest must give 0.
  const Floats factors = broadcast(scale_later ? c.rules.scale : 1.0f);
  Floats most = broadcast(state.largest);
  for (int64_t j = 0; j < padded; j += WIDTH) {
    const Floats s = multiply(load(scores + j), factors);
    store(scores + j, s);
    most = maximum(s, most);  // NaN is passed over here
  }
  const float before = state.largest, now = largest(most), zero = now == HIDDEN ? 0.0f : now;
  const float factor = before == now ? 1.0f : before == HIDDEN ? 0.0f : expf(before - zero);
  const Floats minus = broadcast(-zero);
  const uint32_t hash = c.kept == 0.0f ? 0 : hash_of_query(hash_of_head(c, b, h), static_cast<uint32_t>(i));
  Floats total = zeros();
  for (int64_t j = 0; j < padded; j += WIDTH) {
    const Floats w = exponential(add(load(scores + j), minus));
    total = add(total, w);
    Floats used = w;
    if (c.kept != 0.0f) used = multiply(w, kept(c, hash, counted_from(static_cast<uint32_t>(from + j))));
    Units::write(weights + j / Units::NUMBERS * UNIT, used);
  }
  state.largest = now;
  state.sum = state.sum * factor + sum(total);
  return factor;
}

template <class Units>
void attend_as(const FlashCall& c, int64_t b, int64_t h, int64_t row, char* scratch) {
  const Layout<Units> l(c);
  const int64_t kv = h / (c.heads / c.kv_heads), count = c.length - row < QUERIES ? c.length - row : QUERIES;
  const int64_t rows = up_to(count, ROWS), width = l.value_width();
  const char* keys = c.keys_memory + (b * c.kv_heads + kv - c.first_pair) * l.key_bytes();
  const char* values = c.values_memory + (b * c.kv_heads + kv - c.first_pair) * l.value_bytes();
  float* scores = reinterpret_cast<float*>(scratch);
  float* sums = scores + QUERIES * KEYS;
  char* weights = scratch;
  char* queries = reinterpret_cast<char*>(sums + QUERIES * width);
  const RowsOf query{c.query.data, b * c.query.of_batch + h * c.query.of_head, c.query.of_row, c.length, c.dim, c.dtype};
  pack_rows<Units>(query, row, rows, queries, l.query_row());
  memset(sums, 0, static_cast<size_t>(rows * width) * sizeof(float));

  // the keys that each query sees, and those that any does
  Softmax state[QUERIES];
  int64_t seen[QUERIES][2], first = c.keys, end = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = row + i + c.keys - c.length;
    const int64_t low = at - c.left, high = at + c.right + 1;
    seen[i][0] = low < 0 ? 0 : low;
    seen[i][1] = high < c.keys ? high : c.keys;
    if (c.spans != nullptr) {
      const int64_t* const span = c.spans + 2 * (b * c.length + row + i);
      seen[i][0] = span[0] > seen[i][0] ? span[0] : seen[i][0];
      seen[i][1] = span[1] < seen[i][1] ? span[1] : seen[i][1];
    }
    state[i] = {HIDDEN, 0.0f};
    if (seen[i][0] >= seen[i][1]) continue;
    first = seen[i][0] < first ? seen[i][0] : first;
    end = seen[i][1] > end ? seen[i][1] : end;
  }
  for (int64_t from = first / WIDTH * WIDTH; from < end; from += KEYS) {
    const int64_t some = end - from < KEYS ? end - from : KEYS, padded = up_to(some, WIDTH);
    if (!reach_of(c, b, row, count, from, some).some) continue;
    // the panels of keys that each ROWS queries see between them
    int64_t begins[QUERIES / ROWS], ends[QUERIES / ROWS];
    for (int64_t i = 0; i < rows; i += ROWS) {
      int64_t low = some, high = 0;
      for (int64_t r = i; r < i + ROWS && r < count; ++r) {
        if (seen[r][0] >= seen[r][1]) continue;
        low = seen[r][0] - from < low ? seen[r][0] - from : low;
        high = seen[r][1] - from > high ? seen[r][1] - from : high;
      }
      begins[i / ROWS] = low < 0 ? 0 : low / WIDTH;
      ends[i / ROWS] = high < some ? up_to(high, WIDTH) / WIDTH : padded / WIDTH;
    }
    for (int64_t n = 0; n < padded / WIDTH; n += VECTORS) {  // the outer loop, so that these panels stay in L1
      for (int64_t i = 0; i < rows; i += ROWS) {
        const int64_t begin = begins[i / ROWS] > n ? begins[i / ROWS] : n;
        const int64_t finish = ends[i / ROWS] < n + VECTORS ? ends[i / ROWS] : n + VECTORS;
        if (begin >= finish) continue;
        some_panels<Units>(finish - begin, queries + i * l.query_row(), l.query_row(),
                           keys + (from / WIDTH + begin) * l.key_panel, l.key_panel, PANEL, l.key_units,
                           scores + i * KEYS + begin * WIDTH, KEYS, false);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = begins[i / ROWS] * WIDTH, finish = ends[i / ROWS] * WIDTH < some ? ends[i / ROWS] * WIDTH : some;
      if (begin >= finish) continue;
      const float factor = weigh<Units>(c, b, h, row + i, from + begin, finish - begin, seen[i], scores + i * KEYS + begin,
                                        weights + i * SCORES_ROW + begin / Units::NUMBERS * UNIT, state[i]);
      if (factor == 1.0f) continue;
      const Floats factors = broadcast(factor);
      for (int64_t d = 0; d < width; d += WIDTH) {
        store(sums + i * width + d, multiply(load(sums + i * width + d), factors));
      }
    }
    for (int64_t n = 0; n < l.value_panels; n += VECTORS) {
      const int64_t panels = l.value_panels - n < VECTORS ? l.value_panels - n : VECTORS;
      for (int64_t i = 0; i < rows; i += ROWS) {
        const int64_t begin = begins[i / ROWS] * WIDTH / Units::NUMBERS, finish = ends[i / ROWS] * WIDTH / Units::NUMBERS;
        if (begin >= finish) continue;
        some_panels<Units>(panels, weights + i * SCORES_ROW + begin * UNIT, SCORES_ROW,
                           values + n * l.value_panel_bytes() + (from / Units::NUMBERS + begin) * PANEL,
                           l.value_panel_bytes(), PANEL, finish - begin, sums + i * width + n * WIDTH, width, true);
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    float factor = 1.0f, total = state[i].sum, most = state[i].largest;
    if (c.rules.sinks != nullptr) {
      const float sink = sink_of(c.rules, h);
      most = sink > state[i].largest ? sink : state[i].largest;
      const float zero = most == HIDDEN ? 0.0f : most;
      factor = expf(state[i].largest - zero);
      total = total * factor + expf(sink - zero);
    }
    if (c.logsumexp != nullptr) {
      float* const parts = c.logsumexp + (b * c.heads + h) * 2 * c.length + row + i;
      parts[0] = total == 0.0f ? 0.0f : most, parts[c.length] = total == 0.0f ? INFINITY : logf(total);
    }
    const Floats factors = broadcast(total == 0.0f ? 0.0f : factor / total);
    for (int64_t d = 0; d < width; d += WIDTH) store(sums + i * width + d, multiply(load(sums + i * width + d), factors));
    const int64_t number = ((b * c.length + row + i) * c.heads + h) * c.value_dim;
    write_row(number_at(c.output, number, c.dtype), c.value_dim, c.dtype, sums + i * width);
  }
}

#if defined(__AVX512BF16__)
#define BY_DTYPE(function, ...) \
  return c->dtype == BFLOAT16 ? function<UnitsBFloat16>(*c, ##__VA_ARGS__) : function<UnitsFloat32>(*c, ##__VA_ARGS__)
#else
#define BY_DTYPE(function, ...) return function<UnitsFloat32>(*c, ##__VA_ARGS__)
#endif

FlashSizes sizes(const FlashCall* c) { BY_DTYPE(sizes_as); }
void pack(const FlashCall* c, int64_t b, int64_t kv, char* scratch) { BY_DTYPE(pack_as, b, kv, scratch); }
void attend(const FlashCall* c, int64_t b, int64_t h, int64_t row, char* scratch) {
  BY_DTYPE(attend_as, b, h, row, scratch);
}

}  // namespace

extern const FlashFunctions EASYTORCH_NAME(flash);
const FlashFunctions EASYTORCH_NAME(flash) = {sizes, pack, attend};
