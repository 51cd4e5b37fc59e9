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
// 96 x 128, 192 x 256 and 24 x 512, and 12 rows and 2 vectors or 14 and 2 or 8 and 3 in registers, are within a hundredth
// or slower.
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

// Weights are exp(score - reference), or 2**(score - reference) where the scores are in that unit. A row's reference
// follows its largest score so far where that is more than LEAD above it: sums of weights that large are far from
// overflow, and a reference that stays spares multiplying what has been summed.
constexpr float LEAD = 5.0f, LOG2_OF_E = 1.44269504088896341f;

// Whether the queries are multiplied by the scale, and by log2(e), when they are packed.
template <class Units>
inline bool in_base_two(const FlashCall& c) {
  return Units::NUMBERS == 1 && only_scaled(c.rules) && c.kept == 0.0f && c.logsumexp == nullptr;
}

// What a row sees of a block of keys: those of [from, from + count) between seen[0] and seen[1].
struct RowOfBlock {
  int64_t b, h, i, from, count;
  const int64_t* seen;
  float* scores;
};

// The scores of a row as they are compared; its reference may rise. What its sums so far are to be multiplied by is
// returned.
inline float compare(const FlashCall& c, const RowOfBlock& row, bool base_two, float& reference) {
  const int64_t padded = up_to(row.count, WIDTH);
  float* const scores = row.scores;
  const bool scale_later = !base_two && only_scaled(c.rules);
  if (!base_two && !scale_later) apply_rules(c.rules, row.b, row.h, row.i, row.from, row.count, padded, scores);
  hide(c.rules, row.b, row.h, row.i, row.from, row.count, scores);
  if (c.key_ids != nullptr) {
    const int64_t own = c.query_ids[row.b * c.length + row.i], *ids = c.key_ids + row.b * c.keys + row.from;
    for (int64_t j = 0; j < row.count; ++j) scores[j] = ids[j] == own ? scores[j] : HIDDEN;
  }
  const int64_t first = row.seen[0] - row.from, end = row.seen[1] - row.from;
  for (int64_t j = 0; j < padded && j < first; ++j) scores[j] = HIDDEN;
  for (int64_t j = end < 0 ? 0 : end; j < padded; ++j) scores[j] = HIDDEN;
  Floats most = broadcast(HIDDEN), other = most;  // NaN is passed over
  if (scale_later) {
    // Stored once they are multiplied, so that no compiler rounds product and difference at once: a reference gives 1.
    const Floats factors = broadcast(c.rules.scale);
    for (int64_t j = 0; j < padded; j += WIDTH) {
      const Floats s = multiply(load(scores + j), factors);
      store(scores + j, s);
      most = maximum(s, most);
    }
  } else {
    int64_t j = 0;
    for (; j + WIDTH < padded; j += 2 * WIDTH) {
      most = maximum(load(scores + j), most), other = maximum(load(scores + j + WIDTH), other);
    }
    if (j < padded) most = maximum(load(scores + j), most);
  }
  const float now = largest(maximum(most, other)), before = reference;
  if (!(now > before + LEAD)) return 1.0f;
  reference = now;
  if (before == HIDDEN) return 1.0f;  // there is nothing so far
  return base_two ? exp2f(before - now) : expf(before - now);
}

// How a score less its reference becomes a weight.
struct Powers {
  static constexpr bool MAY_DROP = true;
  static inline Floats of(Floats x) { return exponential(x); }
};
template <bool SHORT>
struct PowersOfTwo {
  static constexpr bool MAY_DROP = false;
  static inline Floats of(Floats x) { return power_of_two<SHORT>(x); }
};

// The scores of a row become weights, whose sums are returned, lane by lane.
template <class Units, class Weights>
inline Floats weigh(const FlashCall& c, const RowOfBlock& row, float reference, char* weights) {
  const int64_t padded = up_to(row.count, WIDTH);
  const Floats minus = broadcast(reference == HIDDEN ? 0.0f : -reference);
  const uint32_t hash = c.kept == 0.0f ? 0 : hash_of_query(hash_of_head(c, row.b, row.h), static_cast<uint32_t>(row.i));
  Floats total = zeros();
  for (int64_t j = 0; j < padded; j += WIDTH) {
    const Floats w = Weights::of(add(load(row.scores + j), minus));
    total = add(total, w);
    Floats used = w;
    if (Weights::MAY_DROP && c.kept != 0.0f) {
      used = multiply(w, kept(c, hash, counted_from(static_cast<uint32_t>(row.from + j))));
    }
    Units::write(weights + j / Units::NUMBERS * UNIT, used);
  }
  return total;
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
  const bool base_two = in_base_two<Units>(c);
  if (base_two) {
    float* const numbers = reinterpret_cast<float*>(queries);
    const Floats factors = broadcast(c.rules.scale * LOG2_OF_E);
    const int64_t last = rows * l.key_units;
    for (int64_t i = 0; i < last; i += WIDTH) {
      write_some<NumbersFloat32>(numbers + i, last - i, multiply(read_some<NumbersFloat32>(numbers + i, last - i), factors));
    }
  }
  memset(sums, 0, static_cast<size_t>(rows * width) * sizeof(float));

  // the keys that each query sees, and those that any does
  float references[QUERIES];
  Floats totals[QUERIES];
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
    references[i] = HIDDEN, totals[i] = zeros();
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
    for (int64_t i = 0; i < count; i += ROWS) {
      const int64_t begin = begins[i / ROWS] * WIDTH, finish = ends[i / ROWS] * WIDTH < some ? ends[i / ROWS] * WIDTH : some;
      if (begin >= finish) continue;
      const int64_t last = i + ROWS < count ? i + ROWS : count;
      const auto row_of_block = [&](int64_t r) {
        return RowOfBlock{b, h, row + r, from + begin, finish - begin, seen[r], scores + r * KEYS + begin};
      };
      for (int64_t r = i; r < last; ++r) {  // before any becomes weights: none waits for the largest score of another
        const float factor = compare(c, row_of_block(r), base_two, references[r]);
        if (factor == 1.0f) continue;
        const Floats factors = broadcast(factor);
        totals[r] = multiply(totals[r], factors);
        for (int64_t d = 0; d < width; d += WIDTH) {
          store(sums + r * width + d, multiply(load(sums + r * width + d), factors));
        }
      }
      for (int64_t r = i; r < last; ++r) {
        char* const to = weights + r * SCORES_ROW + begin / Units::NUMBERS * UNIT;
        const RowOfBlock block = row_of_block(r);
        const Floats added = !base_two              ? weigh<Units, Powers>(c, block, references[r], to)
                             : c.dtype == FLOAT32 ? weigh<Units, PowersOfTwo<false>>(c, block, references[r], to)
                                                  : weigh<Units, PowersOfTwo<true>>(c, block, references[r], to);
        totals[r] = add(totals[r], added);
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
    const float reference = base_two ? references[i] / LOG2_OF_E : references[i];
    float factor = 1.0f, total = sum(totals[i]), most = reference;
    if (c.rules.sinks != nullptr) {
      const float sink = sink_of(c.rules, h);
      most = sink > reference ? sink : reference;
      const float zero = most == HIDDEN ? 0.0f : most;
      factor = expf(reference - zero);
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
