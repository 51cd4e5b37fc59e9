// Attention of one query token: a key and a value are read once for all the heads that share them, softmax as they come
// (arXiv:2205.14135); ranges of keys are combined by their largest scores and sums.
#include "cpu_attention.h"

#include <math.h>

#include "../cpu/functions.h"
#include "../cpu/pack.h"

namespace {

// Keys whose scores are computed before their values are read; with 128 numbers of bfloat16 each, 16 KiB of both.
constexpr int BLOCK = 64;
constexpr int PAIR = 2 * WIDTH;
constexpr float HIDDEN = -INFINITY;

// Two vectors of values, in the order of the sums: position(i) is where number i of a PAIR lies.
struct InOrder {
  static inline int position(int i) { return i; }
};
struct ValuesFloat32 : InOrder {
  typedef float Number;
  static inline void load_pair(const Number* p, Floats& a, Floats& b) { a = load(p), b = load(p + WIDTH); }
};
#if defined(__AVX512F__)
struct ValuesBFloat16 {  // even ones are moved up 16 bits, odd ones are in place already
  typedef uint16_t Number;
  static inline int position(int i) { return i % 2 * WIDTH + i / 2; }
  static inline void load_pair(const Number* p, Floats& a, Floats& b) {
    const __m512i bits = _mm512_loadu_si512(p);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-0x10000)));
  }
};
#else
struct ValuesBFloat16 : InOrder {
  typedef uint16_t Number;
  static inline void load_pair(const Number* p, Floats& a, Floats& b) {
    a = load_bfloat16(p), b = load_bfloat16(p + WIDTH);
  }
};
#endif
struct ValuesFloat16 : InOrder {
  typedef uint16_t Number;
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

// What is read next, asked for in the order of its addresses while the scores before it are computed: rows of keys and of
// values, into the second cache. Measured on one thread of a Zen 4, (B, S, K, D) in bfloat16, of a plain read: 0.35 with
// prefetches head by head, 0.58 so; (B, K, S, D) 0.5 of either.
class Ahead {
 public:
  void add(const void* first, int64_t step, int64_t bytes, int64_t rows) {
    streams_[count_++] = {static_cast<const char*>(first), step, bytes, 0, rows};
    const int64_t lines = (bytes + 63) / 64 * rows;
    share_ = lines > share_ ? lines : share_;
  }
  // A share of it: of `parts` that there are.
  void fetch(int64_t parts) {
    for (int64_t n = (share_ + parts - 1) / parts; n > 0; --n) {
      for (int i = 0; i < count_; ++i) {
        Stream& s = streams_[i];
        if (s.rows == 0) continue;
        __builtin_prefetch(s.row + s.at, 0, 2);
        s.at += 64;
        if (s.at >= s.bytes) s.at = 0, s.row += s.step, --s.rows;
      }
    }
  }

 private:
  struct Stream {
    const char* row;
    int64_t step, bytes, at, rows;
  };
  Stream streams_[2];
  int count_ = 0;
  int64_t share_ = 0;
};

// scores[i * BLOCK + j] = query i . key j of MR queries.
template <class Kind, int MR>
inline void score(const typename Kind::Input* queries, int64_t group, const typename Kind::Weight* keys, int64_t of_key,
                  int count, int64_t dim, Ahead* ahead, float* scores) {
  constexpr int NR = columns_of(MR);
  for (int j = 0; j < count; j += NR) {
    const int some = count - j < NR ? count - j : NR;
    const typename Kind::Weight* rows[NR];
    for (int i = 0; i < NR; ++i) rows[i] = keys + (j + (i < some ? i : some - 1)) * of_key;
    if (ahead != nullptr) ahead->fetch(BLOCK / NR);
    float sums[MR * 4];
    tile<Kind, MR, NR>(queries, group * Kind::STEP, rows, dim, 0, sums);
    for (int i = 0; i < MR; ++i)
      for (int n = 0; n < some; ++n) scores[i * BLOCK + j + n] = sums[4 * i + n];
  }
}

// Scores of head h become weights exp(score - largest); what the sums so far are to be multiplied by is returned.
inline float weigh(const DecodeCall& c, int64_t b, int64_t h, int64_t from, int count, float* scores, float* sums) {
  const int padded = (count + WIDTH - 1) / WIDTH * WIDTH;
  for (int j = count; j < padded; ++j) scores[j] = 0.0f;
  const Floats scale = broadcast(c.scale), cap = broadcast(c.softcap);
  for (int j = 0; j < padded; j += WIDTH) {
    Floats s = multiply(load(scores + j), scale);
    if (c.softcap > 0.0f) s = multiply(hyperbolic_tangent(divide(s, cap)), cap);
    store(scores + j, s);
  }
  if (c.bias.data != nullptr) {
    const int64_t first = b * c.bias.of_batch + h * c.bias.of_head + from * c.bias.of_key;
    for (int j = 0; j < count; ++j) scores[j] += load_number(c.bias.data, first + j * c.bias.of_key, c.bias_dtype);
  }
  if (c.mask.data != nullptr) {
    const uint8_t* mask = static_cast<const uint8_t*>(c.mask.data) + b * c.mask.of_batch + h * c.mask.of_head +
                          from * c.mask.of_key;
    for (int j = 0; j < count; ++j) scores[j] = mask[j * c.mask.of_key] != 0 ? scores[j] : HIDDEN;
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
template <class Values, int MR>
inline void add_values(const float* weights, const typename Values::Number* values, int64_t of_key, int count,
                       int64_t dim, const float* factors, float* sums, int64_t sums_row) {
  for (int64_t d = 0; d < dim; d += PAIR, sums += PAIR, values += PAIR) {
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
        Values::load_pair(values + s * of_key, a, b);
      } else {
        load_rest<Values>(values + s * of_key, rest, a, b);
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

// MR heads of one key/value head and one block of keys.
template <class Kind, class Values, int MR>
void some_heads(const DecodeCall& c, const DecodePart& part, int64_t kv, int64_t first, int64_t from, int count,
                Ahead* ahead) {
  typedef typename Kind::Input Input;
  const int64_t group = c.heads / c.kv_heads, row = sums_row(c.value_dim);
  const int64_t padded = (c.dim + Kind::STEP - 1) / Kind::STEP * Kind::STEP;
  const Input* queries = static_cast<const Input*>(part.queries) + kv * group * padded + first * Kind::STEP;
  const typename Values::Number* values = row_of<typename Values::Number>(c.value, part.b, kv, from);
  float scores[MR * BLOCK], factors[MR];
  score<Kind, MR>(queries, group, row_of<typename Kind::Weight>(c.key, part.b, kv, from), c.key.of_key, count, c.dim,
                  ahead, scores);
  const int64_t h = kv * group + first;
  float* sums = part.sums + h * row;
  for (int i = 0; i < MR; ++i) factors[i] = weigh(c, part.b, h + i, from, count, scores + i * BLOCK, sums + i * row);
  add_values<Values, MR>(scores, values, c.value.of_key, count, c.value_dim, factors, sums + 2, row);
}

bool hides_all(const DecodeCall& c, int64_t b, int64_t kv, int64_t from, int count) {
  if (c.mask.data == nullptr) return false;
  const int64_t group = c.mask.of_head == 0 ? 1 : c.heads / c.kv_heads;
  const uint8_t* mask = static_cast<const uint8_t*>(c.mask.data) + b * c.mask.of_batch +
                        kv * (c.heads / c.kv_heads) * c.mask.of_head + from * c.mask.of_key;
  for (int64_t h = 0; h < group; ++h)
    for (int j = 0; j < count; ++j)
      if (mask[h * c.mask.of_head + j * c.mask.of_key] != 0) return false;
  return true;
}

// Keys and values to be read after block `from` of head kv: where heads lie within a key, a part of the next block of all
// heads for each of them, else that of this head.
template <class Values>
Ahead next_of(const DecodeCall& c, const DecodePart& part, int64_t kv, int64_t from, bool heads_inside) {
  typedef typename Values::Number Number;
  const int64_t heads = part.kv_end - part.kv_begin, size = sizeof(Number), rest = part.to - (from + BLOCK);
  const int64_t keys = rest < 0 ? 0 : rest < BLOCK ? rest : BLOCK, nth = kv - part.kv_begin;
  const int64_t begin = heads_inside ? keys * nth / heads : 0, end = heads_inside ? keys * (nth + 1) / heads : keys;
  const int64_t first = heads_inside ? part.kv_begin : kv, width = heads_inside ? heads : 1;
  Ahead ahead;
  ahead.add(row_of<Number>(c.key, part.b, first, from + BLOCK + begin), c.key.of_key * size, width * c.dim * size,
            end - begin);
  ahead.add(row_of<Number>(c.value, part.b, first, from + BLOCK + begin), c.value.of_key * size,
            width * c.value_dim * size, end - begin);
  return ahead;
}

template <class Kind, class Values>
void one_block(const DecodeCall& c, const DecodePart& part, int64_t kv, int64_t from, bool heads_inside) {
  const int count = part.to - from < BLOCK ? static_cast<int>(part.to - from) : BLOCK;
  if (hides_all(c, part.b, kv, from, count)) return;
  const int64_t group = c.heads / c.kv_heads;
  Ahead next = next_of<Values>(c, part, kv, from, heads_inside);
  for (int64_t first = 0; first < group;) {
    Ahead* const ahead = first == 0 ? &next : nullptr;
    const int64_t left = group - first;
#if defined(__AVX512F__)
    if (left >= 8) {
      some_heads<Kind, Values, 8>(c, part, kv, first, from, count, ahead);
      first += 8;
      continue;
    }
#endif
#if defined(__AVX2__)
    if (left >= 4) {
      some_heads<Kind, Values, 4>(c, part, kv, first, from, count, ahead);
      first += 4;
      continue;
    }
#endif
    if (left >= 2) {
      some_heads<Kind, Values, 2>(c, part, kv, first, from, count, ahead);
      first += 2;
      continue;
    }
    some_heads<Kind, Values, 1>(c, part, kv, first, from, count, ahead);
    first += 1;
  }
}

template <class Kind, class Values>
void attend_as(const DecodeCall& c, const DecodePart& part) {
  const int64_t group = c.heads / c.kv_heads, row = sums_row(c.value_dim);
  for (int64_t h = part.kv_begin * group; h < part.kv_end * group; ++h) {
    float* sums = part.sums + h * row;
    memset(sums, 0, static_cast<size_t>(row) * sizeof(float));
    sums[0] = HIDDEN;
  }
  // in the order in which the keys lie
  const bool heads_inside = c.key.of_head < c.key.of_key;
  const int64_t heads = part.kv_end - part.kv_begin, blocks = (part.to - part.from + BLOCK - 1) / BLOCK;
  for (int64_t i = 0; i < heads * blocks; ++i) {
    const int64_t kv = heads_inside ? i % heads : i / blocks, block = heads_inside ? i / heads : i % blocks;
    one_block<Kind, Values>(c, part, part.kv_begin + kv, part.from + block * BLOCK, heads_inside);
  }
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
  const float sink = c.sinks == nullptr ? HIDDEN : load_number(c.sinks, h, c.sinks_dtype);
  float most = sink;
  for (int64_t p = 0; p < parts; ++p) most = sums[p * stride] > most ? sums[p * stride] : most;
  const float zero = most == HIDDEN ? 0.0f : most;
  float total = c.sinks == nullptr ? 0.0f : expf(sink - zero);
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
const DecodeFunctions EASYTORCH_NAME(decode) = {packing, pack, sums_row, attend, combine};
