// Attention of few query tokens: a key and a value are read once for all the queries that share them, softmax as they come
// (arXiv:2205.14135); ranges of keys are combined by their largest scores and sums.
#include "cpu_attention.h"

#include <math.h>

#include "../cpu/codes.h"
#include "../cpu/functions.h"
#include "../cpu/pack.h"

namespace {

// Keys whose scores are computed before their values are read: few, so that what is prefetched is read soon. Measured
// on one thread of a loaded Zen 4, B4 H32/8 S4096 D128, share of a plain read's speed with 64 keys and with 16: float32
// (B, K, S, D) 0.54 and 0.68, (B, S, K, D) 0.55 and 0.65; bfloat16 0.51 and 0.51, 0.41 and 0.51.
constexpr int BLOCK = 16;
constexpr int PAIR = 2 * WIDTH;

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

// scores[i * BLOCK + j] = query i . key j of MR queries.
template <class Kind, int MR, class Rows>
inline void score(const typename Kind::Input* queries, int64_t group, Rows keys, int count, int64_t dim,
                  Ahead<Rows>* ahead, float* scores) {
  constexpr int NR = columns_of(MR);
  for (int j = 0; j < count; j += NR) {
    const int some = count - j < NR ? count - j : NR;
    const typename Kind::Weight* rows[NR];
    for (int i = 0; i < NR; ++i) rows[i] = keys[j + (i < some ? i : some - 1)];
    if (ahead != nullptr) ahead->fetch(BLOCK / NR);
    float sums[MR * 4];
    tile<Kind, MR, NR>(queries, group * Kind::STEP, rows, dim, 0, sums);
    for (int i = 0; i < MR; ++i)
      for (int n = 0; n < some; ++n) scores[i * BLOCK + j + n] = sums[4 * i + n];
  }
}

// Scores of head h become weights exp(score - largest), 0 of keys outside of [seen[0], seen[1]) unless that is null; what
// the sums so far are to be multiplied by is returned.
inline float weigh(const DecodeCall& c, int64_t b, int64_t h, int64_t from, int count, const int64_t* seen,
                   float* scores, float* sums) {
  const int padded = (count + WIDTH - 1) / WIDTH * WIDTH;
  for (int j = count; j < padded; ++j) scores[j] = 0.0f;
  apply_rules(c.rules, b, h, 0, from, count, padded, scores);
  hide(c.rules, b, h, 0, from, count, scores);
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
template <class Values, int MR, class Rows>
inline void add_values(const float* weights, Rows values, int count, int64_t dim, const float* factors, float* sums,
                       int64_t sums_row) {
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

int64_t sums_row(int64_t value_dim) { return 2 + (value_dim + PAIR - 1) / PAIR * PAIR; }

// MR queries of one key/value head and one block of keys.
template <class Kind, class Values, int MR, class Rows>
void some_queries(const DecodeCall& c, const DecodePart& part, int64_t kv, int64_t first, Rows keys, Rows values,
                  int64_t from, int count, Ahead<Rows>* ahead) {
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
  score<Kind, MR>(queries, group, keys, count, c.dim, ahead, scores);
  const int64_t h = kv * group + first;
  float* sums = part.sums + h * row;
  for (int i = 0; i < MR; ++i) {
    const int64_t* const its = seen == nullptr ? nullptr : seen + 2 * i;
    factors[i] = weigh(c, part.b, h + i, from, count, its, scores + i * BLOCK, sums + i * row);
  }
  add_values<Values, MR>(scores, values, count, c.value_dim, factors, sums + 2, row);
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

template <class Kind, class Values, class Rows>
void one_block(const DecodeCall& c, const DecodePart& part, int64_t kv, Rows keys, Rows values, int64_t from, int count,
               Ahead<Rows> next) {
  for (int64_t first = 0; first < part.group;) {
    Ahead<Rows>* const ahead = first == 0 ? &next : nullptr;
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

// A dense cache, in the order in which the keys lie: where heads lie within a key, a block of all heads after another, and
// with each of them a part of the next is prefetched; else head by head.
template <class Kind, class Values>
void attend_dense(const DecodeCall& c, const DecodePart& part) {
  typedef typename Values::Number Number;
  const bool heads_inside = c.key.of_head < c.key.of_key;
  const int64_t heads = part.kv_end - part.kv_begin, blocks = (part.to - part.from + BLOCK - 1) / BLOCK;
  const auto rows = [&](const DecodeCache& cache, int64_t kv, int64_t from) {
    return EvenRows<Number>{row_of<Number>(cache, part.b, kv, from - c.first), cache.of_key};
  };
  for (int64_t i = 0; i < heads * blocks; ++i) {
    const int64_t nth = heads_inside ? i % heads : i / blocks, block = heads_inside ? i / heads : i % blocks;
    const int64_t kv = part.kv_begin + nth, from = part.from + block * BLOCK, next = from + BLOCK;
    const int count = within(part.to - from);
    if (hides_all(c, part.b, kv, from, count)) continue;
    const int64_t first = heads_inside ? part.kv_begin : kv, shares = heads_inside ? heads : 1;
    one_block<Kind, Values>(c, part, kv, rows(c.key, kv, from), rows(c.value, kv, from), from, count,
                            share_of(c, rows(c.key, first, next), rows(c.value, first, next), within(part.to - next),
                                     shares, heads_inside ? nth : 0, shares));
  }
}

// Where the keys and values of a block lie in their pools, without the head.
struct Places {
  int64_t keys[BLOCK], values[BLOCK];
};

inline void find(const DecodeCall& c, const DecodePages& pages, int64_t from, int count, Places& places) {
  int64_t page = from / pages.size, slot = from % pages.size;
  for (int j = 0; j < count; ++j) {
    const int64_t number = pages.table[page - pages.first];
    places.keys[j] = number * c.key.of_batch + slot * c.key.of_key;
    places.values[j] = number * c.value.of_batch + slot * c.value.of_key;
    if (++slot == pages.size) slot = 0, ++page;
  }
}

template <class Kind, class Values>
void attend_pages(const DecodeCall& c, const DecodePart& part) {
  typedef typename Values::Number Number;
  const int64_t heads = part.kv_end - part.kv_begin;
  const auto rows = [&](const DecodeCache& cache, int64_t kv, const int64_t* places) {
    return PagedRows<Number>{static_cast<const Number*>(cache.data) + kv * cache.of_head, places};
  };
  Places of[2];
  find(c, *part.pages, part.from, within(part.to - part.from), of[0]);
  for (int64_t from = part.from, block = 0; from < part.to; from += BLOCK, ++block) {
    const Places &now = of[block % 2], &next = of[1 - block % 2];
    const int count = within(part.to - from), following = within(part.to - (from + BLOCK));
    find(c, *part.pages, from + BLOCK, following, of[1 - block % 2]);
    for (int64_t nth = 0; nth < heads; ++nth) {
      const int64_t kv = part.kv_begin + nth;
      one_block<Kind, Values>(c, part, kv, rows(c.key, kv, now.keys), rows(c.value, kv, now.values), from, count,
                              share_of(c, rows(c.key, part.kv_begin, next.keys),
                                       rows(c.value, part.kv_begin, next.values), following, heads, nth, heads));
    }
  }
}

int64_t decoded_bytes(const DecodeCall* c) {
  return c->codes == NO_CODES ? 0 : BLOCK * (c->dim + c->value_dim) * (c->dtype == FLOAT32 ? 4 : 2);
}

// Keys and values of one byte, dense or in pages: those of a block and head are decoded, and attended to as others are.
template <class Kind, class Values, class Codes>
void attend_codes(const DecodeCall& c, const DecodePart& part) {
  typedef typename Values::Number Number;
  Number* const keys = reinterpret_cast<Number*>(part.decoded);
  Number* const values = keys + BLOCK * c.dim;
  int64_t batch[2 * BLOCK], slot[2 * BLOCK];  // where the keys of a block and of the next one lie
  const auto decoded = [&](const DecodeCache& cache, int64_t kv, int64_t dim, int count, int following, Number* out) {
    const auto row = [&](int j) {
      return static_cast<const uint8_t*>(cache.data) + batch[j] * cache.of_batch + kv * cache.of_head + slot[j] * cache.of_key;
    };
    for (int j = 0; j < count; ++j) {
      for (int64_t d = 0; d < dim && j < following; d += 64) __builtin_prefetch(row(BLOCK + j) + d, 0, 2);
      const int64_t at = batch[j] * cache.scale_of_batch + kv * cache.scale_of_head + slot[j] * cache.scale_of_key;
      decode_row<Codes, Values>(row(j), cache.scale + at, cache.group_size, dim, out + j * dim);
    }
    return EvenRows<Number>{out, dim};
  };
  for (int64_t from = part.from; from < part.to; from += BLOCK) {
    const int count = within(part.to - from), following = within(part.to - from - BLOCK);
    for (int j = 0; j < BLOCK + following && j < 2 * BLOCK; ++j) {
      const int64_t key = from + j - c.first;
      if (j >= count && j < BLOCK) continue;
      batch[j] = part.pages == nullptr ? part.b : part.pages->table[key / part.pages->size - part.pages->first];
      slot[j] = part.pages == nullptr ? key : key % part.pages->size;
    }
    for (int64_t kv = part.kv_begin; kv < part.kv_end; ++kv) {
      if (hides_all(c, part.b, kv, from, count)) continue;
      one_block<Kind, Values>(c, part, kv, decoded(c.key, kv, c.dim, count, following, keys),
                              decoded(c.value, kv, c.value_dim, count, following, values), from, count,
                              Ahead<EvenRows<Number>>());
    }
  }
}

template <class Kind, class Values>
void attend_as(const DecodeCall& c, const DecodePart& part) {
  const int64_t row = sums_row(c.value_dim);
  for (int64_t h = part.kv_begin * part.group; h < part.kv_end * part.group; ++h) {
    float* sums = part.sums + h * row;
    memset(sums, 0, static_cast<size_t>(row) * sizeof(float));
    sums[0] = HIDDEN;
  }
  switch (c.codes) {
    case CODES_INT8: return attend_codes<Kind, Values, CodesInt8>(c, part);
    case CODES_E4M3FN: return attend_codes<Kind, Values, CodesE4M3FN>(c, part);
    case CODES_E5M2: return attend_codes<Kind, Values, CodesE5M2>(c, part);
    default: break;
  }
  return part.pages == nullptr ? attend_dense<Kind, Values>(c, part) : attend_pages<Kind, Values>(c, part);
}

void attend(const DecodeCall* c, const DecodePart* part) {
  switch (c->dtype) {
    case FLOAT32: return attend_as<OfFloat32, ValuesFloat32>(*c, *part);
#if defined(__AVX512BF16__)
    case BFLOAT16: return attend_as<OfBFloat16Pairs, ValuesBFloat16>(*c, *part);
#else
    case BFLOAT16: return attend_as<OfBFloat16, ValuesBFloat16>(*c, *part);
#endif
    case FLOAT16: return attend_as<OfFloat16, ValuesFloat16>(*c, *part);
  }
}

template <class Values>
void write(const DecodeCall& c, int64_t number, const float* sums, float factor) {
  for (int64_t d = 0; d < c.value_dim; ++d) {
    const int64_t at = d / PAIR * PAIR + Values::position(static_cast<int>(d % PAIR));
    store_number(c.output, number + d, c.dtype, sums[at] * factor);
  }
}

void combine(const DecodeCall* call, int64_t b, int64_t h, float* sums, int64_t parts, int64_t stride) {
  const DecodeCall& c = *call;
  const int64_t row = sums_row(c.value_dim);
  const float sink = sink_of(c.rules, h);
  float most = sink;
  for (int64_t p = 0; p < parts; ++p) most = sums[p * stride] > most ? sums[p * stride] : most;
  const float zero = most == HIDDEN ? 0.0f : most;
  float total = c.rules.sinks == nullptr ? 0.0f : expf(sink - zero);
  for (int64_t p = 0; p < parts; ++p) {
    const float factor = expf(sums[p * stride] - zero);
    total += sums[p * stride + 1] * factor;
    for (int64_t d = 2; d < row; d += WIDTH) {
      const Floats part = multiply(load(sums + p * stride + d), broadcast(factor));
      store(sums + d, p == 0 ? part : add(load(sums + d), part));
    }
  }
  const float factor = parts == 0 ? 0.0f : 1.0f / (total == 0.0f ? 1.0f : total);
  const int64_t number = (b * c.heads + h) * c.value_dim;
  if (parts == 0) {
    for (int64_t d = 0; d < c.value_dim; ++d) store_number(c.output, number + d, c.dtype, 0.0f);
  } else if (c.dtype == FLOAT32) {
    write<ValuesFloat32>(c, number, sums + 2, factor);
  } else if (c.dtype == BFLOAT16) {
    write<ValuesBFloat16>(c, number, sums + 2, factor);
  } else {
    write<ValuesFloat16>(c, number, sums + 2, factor);
  }
}

}  // namespace

extern const DecodeFunctions EASYTORCH_NAME(decode);
const DecodeFunctions EASYTORCH_NAME(decode) = {packing, pack, sums_row, decoded_bytes, attend, combine};
