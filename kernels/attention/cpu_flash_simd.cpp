// Attention of many query tokens: tiles of scores by products in registers, softmax as the keys come (arXiv:2205.14135).
#include "cpu_flash.h"

#include <math.h>

#include "../cpu/functions.h"
#include "../cpu/numbers.h"

namespace {

// Rows and vectors of a product that is kept in registers.
#if defined(__AVX512F__)
constexpr int ROWS = 6, VECTORS = 4;
#elif defined(__AVX2__)
constexpr int ROWS = 4, VECTORS = 2;
#else
constexpr int ROWS = 2, VECTORS = 2;
#endif
// Queries of a task, and keys whose scores are computed at once: 48 x 128 scores fit the L2 cache.
constexpr int QUERIES = 48, KEYS = 128;

// What is multiplied lies in units of 32 bits: a number of float32, or two of bfloat16 that are multiplied as a pair.
struct UnitsFloat32 {
  static constexpr int NUMBERS = 1;
  typedef Floats Vector;
  static inline Vector read(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  static inline Vector repeat(const char* p) {
    float value;
    memcpy(&value, p, sizeof value);
    return broadcast(value);
  }
  static inline Floats dot(Vector a, Vector b, Floats total) { return multiply_add(a, b, total); }
  static inline void write(char* p, Floats v) { store(reinterpret_cast<float*>(p), v); }
  static inline void put(char* p, const void* from, int64_t index, int32_t dtype) {
    const float value = load_number(from, index, dtype);
    memcpy(p, &value, sizeof value);
  }
};
#if defined(__AVX512BF16__)
struct UnitsBFloat16 {
  static constexpr int NUMBERS = 2;
  typedef __m512i Vector;
  static inline Vector read(const char* p) { return _mm512_loadu_si512(p); }
  static inline Vector repeat(const char* p) {
    int32_t value;
    memcpy(&value, p, sizeof value);
    return _mm512_set1_epi32(value);
  }
  static inline Floats dot(Vector a, Vector b, Floats total) {
    return _mm512_dpbf16_ps(total, (__m512bh)a, (__m512bh)b);
  }
  // weights of 0 to 1, of which VCVTNEPS2BF16 takes the subnormal ones for 0
  static inline void write(char* p, Floats v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
  }
  static inline void put(char* p, const void* from, int64_t index, int32_t) {
    memcpy(p, static_cast<const uint16_t*>(from) + index, 2);
  }
};
#endif

constexpr int64_t UNIT = 4, PANEL = UNIT * WIDTH;

inline int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// How a call is laid out for units of a kind. A panel has WIDTH keys (or numbers of a value) side by side for each unit.
template <class Units>
struct Layout {
  int64_t key_units, value_panels, padded_keys;  // units of a head; panels of a value; keys, up to whole panels
  explicit Layout(const FlashCall& c)
      : key_units((c.dim + Units::NUMBERS - 1) / Units::NUMBERS), value_panels((c.value_dim + WIDTH - 1) / WIDTH),
        padded_keys(up_to(c.keys, WIDTH)) {}
  int64_t key_bytes() const { return padded_keys * key_units * UNIT; }
  int64_t value_panel_bytes() const { return padded_keys / Units::NUMBERS * PANEL; }
  int64_t value_bytes() const { return value_panels * value_panel_bytes(); }
  int64_t value_width() const { return value_panels * WIDTH; }
  int64_t query_row() const { return key_units * UNIT; }
};
// The bytes of one row of weights, of a tile of scores.
template <class Units>
constexpr int64_t weights_row() { return KEYS / Units::NUMBERS * UNIT; }

template <class Units>
FlashSizes sizes_as(const FlashCall& c) {
  const Layout<Units> l(c);
  const int64_t scratch = QUERIES * (l.query_row() + weights_row<Units>() + 4 * (KEYS + l.value_width()));
  return {QUERIES, l.key_bytes(), l.value_bytes(), scratch};
}

template <class Units>
void pack_as(const FlashCall& c, int64_t b, int64_t kv) {
  const Layout<Units> l(c);
  char* keys = c.keys_memory + (b * c.kv_heads + kv) * l.key_bytes();
  char* values = c.values_memory + (b * c.kv_heads + kv) * l.value_bytes();
  const int64_t step = UNIT / Units::NUMBERS;
  memset(keys, 0, static_cast<size_t>(l.key_bytes()));
  for (int64_t j = 0; j < c.keys; ++j) {
    const int64_t from = b * c.key.of_batch + kv * c.key.of_head + j * c.key.of_row;
    char* to = keys + (j / WIDTH * l.key_units * WIDTH + j % WIDTH) * UNIT;
    for (int64_t d = 0; d < c.dim; ++d) {
      Units::put(to + d / Units::NUMBERS * PANEL + d % Units::NUMBERS * step, c.key.data, from + d, c.dtype);
    }
  }
  memset(values, 0, static_cast<size_t>(l.value_bytes()));
  for (int64_t j = 0; j < c.keys; ++j) {
    const int64_t from = b * c.value.of_batch + kv * c.value.of_head + j * c.value.of_row;
    char* to = values + j / Units::NUMBERS * PANEL + j % Units::NUMBERS * step;
    for (int64_t d = 0; d < c.value_dim; ++d) {
      Units::put(to + d / WIDTH * l.value_panel_bytes() + d % WIDTH * UNIT, c.value.data, from + d, c.dtype);
    }
  }
}

// y (ROWS, N * WIDTH) = a (ROWS, units) @ b, whose panels lie `panel` bytes apart; plus y where `add` is set.
template <class Units, int N>
inline void product(const char* a, int64_t a_row, const char* b, int64_t panel, int64_t units, float* y, int64_t y_row,
                    bool add_to) {
  Floats totals[ROWS][N];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) totals[i][n] = add_to ? load(y + i * y_row + n * WIDTH) : zeros();
  for (int64_t u = 0; u < units; ++u) {
    typename Units::Vector columns[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) columns[n] = Units::read(b + n * panel + u * PANEL);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const typename Units::Vector row = Units::repeat(a + i * a_row + u * UNIT);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) totals[i][n] = Units::dot(row, columns[n], totals[i][n]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(y + i * y_row + n * WIDTH, totals[i][n]);
}

// The same of `rows`, up to a multiple of ROWS, and of `panels`.
template <class Units>
inline void multiply_rows(const char* a, int64_t a_row, int64_t rows, const char* b, int64_t panel, int64_t panels,
                          int64_t units, float* y, int64_t y_row, bool add_to) {
  for (int64_t n = 0; n < panels;) {  // the outer loop, so that a panel of b stays in L1 for all rows
    const bool several = n + VECTORS <= panels;
    for (int64_t i = 0; i < rows; i += ROWS) {
      float* to = y + i * y_row + n * WIDTH;
      if (several) {
        product<Units, VECTORS>(a + i * a_row, a_row, b + n * panel, panel, units, to, y_row, add_to);
      } else {
        product<Units, 1>(a + i * a_row, a_row, b + n * panel, panel, units, to, y_row, add_to);
      }
    }
    n += several ? VECTORS : 1;
  }
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
  Floats total = zeros();
  for (int64_t j = 0; j < padded; j += WIDTH) {
    const Floats w = exponential(add(load(scores + j), minus));
    Units::write(weights + j / Units::NUMBERS * UNIT, w);
    total = add(total, w);
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
  const char* keys = c.keys_memory + (b * c.kv_heads + kv) * l.key_bytes();
  const char* values = c.values_memory + (b * c.kv_heads + kv) * l.value_bytes();
  float* scores = reinterpret_cast<float*>(scratch);
  float* sums = scores + QUERIES * KEYS;
  char* weights = reinterpret_cast<char*>(sums + QUERIES * width);
  char* queries = weights + QUERIES * weights_row<Units>();
  memset(queries, 0, static_cast<size_t>(rows * l.query_row()));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = b * c.query.of_batch + h * c.query.of_head + (row + i) * c.query.of_row;
    for (int64_t d = 0; d < c.dim; ++d) {
      Units::put(queries + i * l.query_row() + d * (UNIT / Units::NUMBERS), c.query.data, from + d, c.dtype);
    }
  }
  memset(sums, 0, static_cast<size_t>(rows * width) * sizeof(float));
  memset(weights, 0, static_cast<size_t>(rows * weights_row<Units>()));  // of the rows that only fill up

  // the keys that each query sees, and those that any does
  Softmax state[QUERIES];
  int64_t seen[QUERIES][2], first = c.keys, end = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = row + i + c.keys - c.length;
    const int64_t low = at - c.left, high = at + c.right + 1;
    seen[i][0] = low < 0 ? 0 : low;
    seen[i][1] = high < c.keys ? high : c.keys;
    state[i] = {HIDDEN, 0.0f};
    if (seen[i][0] >= seen[i][1]) continue;
    first = seen[i][0] < first ? seen[i][0] : first;
    end = seen[i][1] > end ? seen[i][1] : end;
  }
  for (int64_t from = first / WIDTH * WIDTH; from < end; from += KEYS) {
    const int64_t some = end - from < KEYS ? end - from : KEYS, padded = up_to(some, WIDTH);
    multiply_rows<Units>(queries, l.query_row(), rows, keys + from * l.key_units * UNIT, l.key_units * PANEL,
                         padded / WIDTH, l.key_units, scores, KEYS, false);
    for (int64_t i = 0; i < count; ++i) {
      const float factor = weigh<Units>(c, b, h, row + i, from, some, seen[i], scores + i * KEYS,
                                        weights + i * weights_row<Units>(), state[i]);
      if (factor == 1.0f) continue;
      const Floats factors = broadcast(factor);
      for (int64_t d = 0; d < width; d += WIDTH) {
        store(sums + i * width + d, multiply(load(sums + i * width + d), factors));
      }
    }
    multiply_rows<Units>(weights, weights_row<Units>(), rows, values + from / Units::NUMBERS * PANEL,
                         l.value_panel_bytes(), l.value_panels, padded / Units::NUMBERS, sums, width, true);
  }
  for (int64_t i = 0; i < count; ++i) {
    float factor = 1.0f, total = state[i].sum;
    if (c.rules.sinks != nullptr) {
      const float sink = sink_of(c.rules, h);
      const float most = sink > state[i].largest ? sink : state[i].largest, zero = most == HIDDEN ? 0.0f : most;
      factor = expf(state[i].largest - zero);
      total = total * factor + expf(sink - zero);
    }
    factor = total == 0.0f ? 0.0f : factor / total;
    const int64_t number = ((b * c.length + row + i) * c.heads + h) * c.value_dim;
    for (int64_t d = 0; d < c.value_dim; ++d) store_number(c.output, number + d, c.dtype, sums[i * width + d] * factor);
  }
}

#if defined(__AVX512BF16__)
#define BY_DTYPE(function, ...) \
  return c->dtype == BFLOAT16 ? function<UnitsBFloat16>(*c, ##__VA_ARGS__) : function<UnitsFloat32>(*c, ##__VA_ARGS__)
#else
#define BY_DTYPE(function, ...) return function<UnitsFloat32>(*c, ##__VA_ARGS__)
#endif

FlashSizes sizes(const FlashCall* c) { BY_DTYPE(sizes_as); }
void pack(const FlashCall* c, int64_t b, int64_t kv) { BY_DTYPE(pack_as, b, kv); }
void attend(const FlashCall* c, int64_t b, int64_t h, int64_t row, char* scratch) {
  BY_DTYPE(attend_as, b, h, row, scratch);
}

}  // namespace

extern const FlashFunctions EASYTORCH_NAME(flash);
const FlashFunctions EASYTORCH_NAME(flash) = {sizes, pack, attend};
