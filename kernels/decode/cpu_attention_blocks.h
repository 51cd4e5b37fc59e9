// Blocks of keys and the queries that see them: scores, softmax as they come (arXiv:2205.14135), weighted sums of the values,
// and the output from the sums of several ranges of keys. The sources that include this say where keys and values lie.
#pragma once

#include <math.h>

#include "../cpu/functions.h"
#include "../cpu/pack.h"
#include "cpu_attention.h"

namespace {

// Keys whose scores are computed before their values are read: few, so that what is prefetched is read soon. Measured
// on one thread of a loaded Zen 4, B4 H32/8 S4096 D128, share of a plain read's speed with 64 keys and with 16: float32
// (B, K, S, D) 0.54 and 0.68, (B, S, K, D) 0.55 and 0.65; bfloat16 0.51 and 0.51, 0.41 and 0.51.
#if defined(EASYTORCH_BLOCK)  // of a source that includes this
constexpr int BLOCK = EASYTORCH_BLOCK;
#else
constexpr int BLOCK = 16;
#endif
constexpr int PAIR = 2 * WIDTH;
// Numbers of a query's sums before those of the values, of which two are used: the others are as long as a vector.
constexpr int LEADING = WIDTH;

// Two vectors of values, in the order of the sums: position(i) is where number i of a PAIR lies.
struct InOrder {
  static inline int position(int i) { return i; }
};
struct ValuesFloat32 : InOrder, NumbersFloat32 {
  static inline void load_pair(const Number* p, Floats& a, Floats& b) { a = load(p), b = load(p + WIDTH); }
};
#if defined(__AVX512F__)
struct ValuesBFloat16 : NumbersBFloat16 {  // even ones are moved up 16 bits, odd ones are in place already
  static inline int position(int i) { return i % 2 * WIDTH + i / 2; }
  static inline void load_pair(const Number* p, Floats& a, Floats& b) {
    const __m512i bits = _mm512_loadu_si512(p);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-0x10000)));
  }
};
#else
struct ValuesBFloat16 : InOrder, NumbersBFloat16 {
  static inline void load_pair(const Number* p, Floats& a, Floats& b) {
    a = load_bfloat16(p), b = load_bfloat16(p + WIDTH);
  }
};
#endif
struct ValuesFloat16 : InOrder, NumbersFloat16 {
  static inline void load_pair(const Number* p, Floats& a, Floats& b) {
    a = load_float16(p), b = load_float16(p + WIDTH);
  }
};

// The first `count` numbers of a pair, and zeros.
template <class Values>
inline void load_rest(const typename Values::Number* p, int64_t count, Floats& a, Floats& b) {
  typename Values::Number rest[PAIR];
#if defined(__AVX512F__)
  // no call of memcpy for each key: masked numbers are not read
  if (sizeof(rest[0]) == 2) {
    _mm512_storeu_si512(rest, _mm512_maskz_loadu_epi16((1u << count) - 1, p));
  } else {
    const uint32_t mask = (1u << count) - 1;
    _mm512_storeu_si512(rest, _mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), p));
    _mm512_storeu_si512(rest + WIDTH, _mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask >> 16), p + WIDTH));
  }
#else
  memset(rest, 0, sizeof rest);
  memcpy(rest, p, static_cast<size_t>(count) * sizeof *rest);
#endif
  Values::load_pair(rest, a, b);
}

template <class Number>
inline const Number* row_of(const DecodeCache& cache, int64_t b, int64_t head, int64_t key) {
  return static_cast<const Number*>(cache.data) + b * cache.of_batch + head * cache.of_head + key * cache.of_key;
}

// Where the rows of a block of keys lie: the same step apart.
template <class Of>
struct EvenRows {
  typedef Of Number;
  const Number* first;
  int64_t step;
  inline const Number* operator[](int64_t j) const { return first + j * step; }
  inline EvenRows from(int64_t j) const { return {first + j * step, step}; }
};

// Each at a place of its own.
template <class Of>
struct PagedRows {
  typedef Of Number;
  const Number* first;
  const int64_t* places;
  inline const Number* operator[](int64_t j) const { return first + places[j]; }
  inline PagedRows from(int64_t j) const { return {first, places + j}; }
};

// Where the keys and values of a block lie, without the head: in the pools of their pages, or in a dense cache.
struct Places {
  int64_t keys[BLOCK], values[BLOCK];
};

inline void find(const DecodeCall& c, const DecodePart& part, int64_t from, int count, Places& places) {
  const DecodePages* const pages = part.pages;
  int64_t page = pages == nullptr ? 0 : from / pages->size, slot = pages == nullptr ? from - c.first : from % pages->size;
  for (int j = 0; j < count; ++j) {
    const int64_t number = pages == nullptr ? part.b : pages->table[page - pages->first];
    places.keys[j] = number * c.key.of_batch + slot * c.key.of_key;
    places.values[j] = number * c.value.of_batch + slot * c.value.of_key;
    if (++slot, pages != nullptr && slot == pages->size) slot = 0, ++page;
  }
}

// Prefetches what is read next, in the order of its addresses, while the scores before it are computed: rows of keys and of
// values, into the L2 cache. Measured on one thread of a Zen 4, (B, S, K, D) in bfloat16, of a plain read: 0.35 with
// prefetches head by head, 0.58 so; (B, K, S, D) 0.5 of either.
template <class Rows>
class Ahead {
 public:
  void add(Rows rows, int64_t bytes, int64_t count) {
    streams_[count_++] = {rows, bytes, 0, 0, count};
    const int64_t lines = (bytes + 63) / 64 * count;
    share_ = lines > share_ ? lines : share_;
  }
  inline int64_t from(const void*, int64_t) const { return 0; }
  inline void fetch_values(int, int64_t) const {}
  // A share of it: of `parts` that there are.
  void fetch(int64_t parts) {
    for (int64_t n = (share_ + parts - 1) / parts; n > 0; --n) {
      for (int i = 0; i < count_; ++i) {
        Stream& s = streams_[i];
        if (s.row == s.count) continue;
        __builtin_prefetch(reinterpret_cast<const char*>(s.rows[s.row]) + s.at, 0, 2);
        s.at += 64;
        if (s.at >= s.bytes) s.at = 0, ++s.row;
      }
    }
  }

 private:
  struct Stream {
    Rows rows;
    int64_t bytes, at, row, count;
  };
  Stream streams_[2];
  int count_ = 0;
  int64_t share_ = 0;
};

// The rows of keys and values that are prefetched with those of a block, number by number as these are read.
template <class Of>
struct Beside {
  typedef Of Number;
  const Number *keys[BLOCK], *values[BLOCK];

  inline void fetch(int64_t) {}
  inline int64_t from(const Number* row, int64_t j) const { return keys[j] - row; }
  inline void fetch_values(int64_t s, int64_t d) const {
#pragma GCC unroll 2
    for (int at = 0; at < PAIR; at += 64 / static_cast<int>(sizeof(Number))) {
      __builtin_prefetch(values[s] + d + at, 0, 2);
    }
  }
};

// scores[i * BLOCK + j] = query i . key j of MR queries.
template <class Kind, int MR, class Rows, class Next>
inline void score(const typename Kind::Input* queries, int64_t group, Rows keys, int count, int64_t dim, Next* next,
                  float* scores) {
  constexpr int NR = columns_of(MR);
  for (int j = 0; j < count; j += NR) {
    const int some = count - j < NR ? count - j : NR;
    const typename Kind::Weight* rows[NR];
    for (int i = 0; i < NR; ++i) rows[i] = keys[j + (i < some ? i : some - 1)];
    if (next != nullptr) next->fetch(BLOCK / NR);
    int64_t ahead[NR];
    for (int i = 0; i < NR; ++i) ahead[i] = next == nullptr ? 0 : next->from(rows[i], j + (i < some ? i : some - 1));
    float sums[MR * 4];
    tile<Kind, MR, NR>(queries, group * Kind::STEP, rows, dim, ahead, sums);
    for (int i = 0; i < MR; ++i)
      for (int n = 0; n < some; ++n) scores[i * BLOCK + j + n] = sums[4 * i + n];
  }
}

// Scores of head h of token i become weights exp(score - largest), 0 of keys outside of [seen[0], seen[1]) unless that is
// null; what the sums so far are to be multiplied by is returned.
inline float weigh(const DecodeCall& c, int64_t b, int64_t h, int64_t i, int64_t from, int count, const int64_t* seen,
                   float* scores, float* sums) {
  const int padded = (count + WIDTH - 1) / WIDTH * WIDTH;
  for (int j = count; j < padded; ++j) scores[j] = 0.0f;
  apply_rules(c.rules, b, h, i, from, count, padded, scores);
  hide(c.rules, b, h, i, from, count, scores);
  if (seen != nullptr) {
    for (int j = 0; j < count; ++j) scores[j] = seen[0] <= from + j && from + j < seen[1] ? scores[j] : HIDDEN;
  }
  for (int j = count; j < padded; ++j) scores[j] = HIDDEN;
  Floats most = broadcast(sums[0]);
  for (int j = 0; j < padded; j += WIDTH) most = maximum(load(scores + j), most);  // NaN is passed over here
  const float before = sums[0], now = largest(most);
  const float zero = now == HIDDEN ? 0.0f : now;
  const float factor = before == now ? 1.0f : before == HIDDEN ? 0.0f : expf(before - zero);
  Floats total = zeros();
  for (int j = 0; j < padded; j += WIDTH) {
    const Floats weights = exponential(add(load(scores + j), broadcast(-zero)));
    store(scores + j, weights);
    total = add(total, weights);
  }
  sums[0] = now;
  sums[1] = sums[1] * factor + sum(total);
  return factor;
}

// sums[i] = sums[i] * factors[i] + weights[i] @ values.
template <class Values, int MR, class Rows, class Next>
inline void add_values(const float* weights, Rows values, int count, int64_t dim, const float* factors, float* sums,
                       int64_t sums_row, const Next* next) {
  for (int64_t d = 0; d < dim; d += PAIR, sums += PAIR, values.first += PAIR) {
    Floats low[MR], high[MR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const Floats factor = broadcast(factors[i]);
      low[i] = multiply(load(sums + i * sums_row), factor);
      high[i] = multiply(load(sums + i * sums_row + WIDTH), factor);
    }
    const int64_t rest = dim - d;
    for (int s = 0; s < count; ++s) {
      Floats a, b;
      if (next != nullptr) next->fetch_values(s, d);
      if (rest >= PAIR) {
        Values::load_pair(values[s], a, b);
      } else {
        load_rest<Values>(values[s], rest, a, b);
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
        const Floats weight = broadcast(weights[i * BLOCK + s]);
        low[i] = multiply_add(weight, a, low[i]);
        high[i] = multiply_add(weight, b, high[i]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      store(sums + i * sums_row, low[i]);
      store(sums + i * sums_row + WIDTH, high[i]);
    }
  }
}

int64_t sums_row(int64_t value_dim) { return LEADING + (value_dim + PAIR - 1) / PAIR * PAIR; }

// MR queries of one key/value head and one block of keys.
template <class Kind, class Values, int MR, class Rows, class Next>
void some_queries(const DecodeCall& c, const DecodePart& part, int64_t kv, int64_t first, Rows keys, Rows values,
                  int64_t from, int count, Next* next) {
  typedef typename Kind::Input Input;
  const int64_t group = part.group, row = sums_row(c.value_dim);
  const int64_t* const seen = part.seen == nullptr ? nullptr : part.seen + 2 * first;
  if (seen != nullptr) {
    bool any = false;
    for (int i = 0; i < MR; ++i) any = any || (seen[2 * i] < from + count && from < seen[2 * i + 1]);
    if (!any) return;
  }
  const int64_t padded = (c.dim + Kind::STEP - 1) / Kind::STEP * Kind::STEP;
  const Input* queries = static_cast<const Input*>(part.queries) + kv * group * padded + first * Kind::STEP;
  float scores[MR * BLOCK], factors[MR];
  score<Kind, MR>(queries, group, keys, count, c.dim, next, scores);
  float* sums = part.sums + (kv * group + first) * row;
  for (int i = 0; i < MR; ++i) {
    const int64_t* const its = seen == nullptr ? nullptr : seen + 2 * i;
    const int64_t query = part.query + kv * group + first + i, token = query < c.heads ? 0 : query / c.heads;
    factors[i] = weigh(c, part.b, query - token * c.heads, token, from, count, its, scores + i * BLOCK, sums + i * row);
  }
  add_values<Values, MR>(scores, values, count, c.value_dim, factors, sums + LEADING, row, next);
}

bool hides_all(const DecodeCall& c, int64_t b, int64_t kv, int64_t from, int count) {
  const ScoreMatrix& matrix = c.rules.mask;
  if (matrix.data == nullptr) return false;
  const int64_t group = matrix.of_head == 0 ? 1 : c.heads / c.kv_heads;
  const uint8_t* mask =
      static_cast<const uint8_t*>(matrix.data) + place_of(matrix, b, kv * (c.heads / c.kv_heads), 0, from);
  for (int64_t h = 0; h < group; ++h)
    for (int j = 0; j < count; ++j)
      if (mask[h * matrix.of_head + j * matrix.of_column] != 0) return false;
  return true;
}

// A share of the keys and values of a block that is read next, `count` rows of `heads` heads: the nth of `shares`.
template <class Rows>
Ahead<Rows> share_of(const DecodeCall& c, Rows keys, Rows values, int64_t count, int64_t heads, int64_t nth,
                     int64_t shares) {
  constexpr int64_t size = sizeof(typename Rows::Number);
  const int64_t begin = count * nth / shares, end = count * (nth + 1) / shares;
  Ahead<Rows> ahead;
  ahead.add(keys.from(begin), heads * c.dim * size, end - begin);
  ahead.add(values.from(begin), heads * c.value_dim * size, end - begin);
  return ahead;
}

template <class Kind, class Values, class Rows, class Next>
void one_block(const DecodeCall& c, const DecodePart& part, int64_t kv, Rows keys, Rows values, int64_t from, int count,
               Next* next) {
  for (int64_t first = 0; first < part.group;) {
    Next* const ahead = first == 0 ? next : nullptr;
    const int64_t left = part.group - first;
#if defined(__AVX512F__)
    if (left >= 8) {
      some_queries<Kind, Values, 8>(c, part, kv, first, keys, values, from, count, ahead);
      first += 8;
      continue;
    }
#endif
#if defined(__AVX2__)
    if (left >= 4) {
      some_queries<Kind, Values, 4>(c, part, kv, first, keys, values, from, count, ahead);
      first += 4;
      continue;
    }
#endif
    if (left >= 2) {
      some_queries<Kind, Values, 2>(c, part, kv, first, keys, values, from, count, ahead);
      first += 2;
      continue;
    }
    some_queries<Kind, Values, 1>(c, part, kv, first, keys, values, from, count, ahead);
    first += 1;
  }
}

inline int within(int64_t keys) { return static_cast<int>(keys < 0 ? 0 : keys < BLOCK ? keys : BLOCK); }

// The sums of head h over `parts` ranges of keys become those of all, in the first range's place; what they are to be
// multiplied by is returned.
inline float reduce(const DecodeCall& c, int64_t h, float* sums, int64_t parts, int64_t stride) {
  const int64_t row = sums_row(c.value_dim);
  const float sink = sink_of(c.rules, h);
  float most = sink;
  for (int64_t p = 0; p < parts; ++p) most = sums[p * stride] > most ? sums[p * stride] : most;
  const float zero = most == HIDDEN ? 0.0f : most;
  float total = c.rules.sinks == nullptr ? 0.0f : expf(sink - zero);
  for (int64_t p = 0; p < parts; ++p) {
    const float factor = expf(sums[p * stride] - zero);
    total += sums[p * stride + 1] * factor;
    for (int64_t d = LEADING; d < row; d += WIDTH) {
      const Floats part = multiply(load(sums + p * stride + d), broadcast(factor));
      store(sums + d, p == 0 ? part : add(load(sums + d), part));
    }
  }
  return parts == 0 ? 0.0f : 1.0f / (total == 0.0f ? 1.0f : total);
}

}  // namespace
