// Attention of few query tokens: a key and a value are read once for all the queries that share them, softmax as they come
// (arXiv:2205.14135); ranges of keys are combined by their largest scores and sums.
#include "../cpu/codes.h"
#include "../cpu/vendor.h"
#include "cpu_attention_blocks.h"

namespace {

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
    auto ahead = share_of(c, rows(c.key, first, next), rows(c.value, first, next), within(part.to - next), shares,
                          heads_inside ? nth : 0, shares);
    one_block<Kind, Values>(c, part, kv, rows(c.key, kv, from), rows(c.value, kv, from), from, count, &ahead);
  }
}

// The same on Intel's: TOGETHER heads, block by block, and with each of these blocks a share of the next ones of all these
// heads, number by number: prefetches wait for each other where many come at once, and more are in flight over several
// heads. B8 H32/8 S4096 D128, one thread of a Xeon (Emerald Rapids), of the time of the above: (B, K, S, D) with four heads
// float32 0.78 and bfloat16 0.68, with one 0.91 and 0.73; (B, S, K, D) with one 0.79 and 0.84, with four 1.02 and 1.16.
template <class Kind, class Values, int TOGETHER>
void attend_together(const DecodeCall& c, const DecodePart& part) {
  typedef typename Values::Number Number;
  constexpr int SHARE = BLOCK / TOGETHER;  // rows of a head
  const int64_t heads = part.kv_end - part.kv_begin, blocks = (part.to - part.from + BLOCK - 1) / BLOCK;
  const auto rows = [&](const DecodeCache& cache, int64_t kv, int64_t from) {
    return EvenRows<Number>{row_of<Number>(cache, part.b, kv, from - c.first), cache.of_key};
  };
  // where heads lie within a key, a block of all of them after another
  const int64_t of_round = c.key.of_head < c.key.of_key ? heads : TOGETHER;
  for (int64_t i = 0; i < heads * blocks; ++i) {
    const auto head_of = [&](int64_t i) { return part.kv_begin + i / (of_round * blocks) * of_round + i % of_round; };
    const auto from_of = [&](int64_t i) { return part.from + i / of_round % blocks * BLOCK; };
    const int64_t kv = head_of(i), from = from_of(i), next = i + of_round;
    const int count = within(part.to - from);
    if (hides_all(c, part.b, kv, from, count)) continue;
    Beside<Number> beside;
    const bool there = next < heads * blocks && within(part.to - from_of(next)) == BLOCK;
    for (int64_t h = 0; h < TOGETHER && there; ++h) {
      const int64_t head = head_of(next) - next % TOGETHER + h, first = from_of(next) + next % TOGETHER * SHARE;
      const EvenRows<Number> keys = rows(c.key, head, first), values = rows(c.value, head, first);
      for (int j = 0; j < SHARE; ++j) {
        beside.keys[j * TOGETHER + h] = keys[j], beside.values[j * TOGETHER + h] = values[j];
      }
    }
    one_block<Kind, Values>(c, part, kv, rows(c.key, kv, from), rows(c.value, kv, from), from, count,
                            there ? &beside : nullptr);
  }
}

template <class Kind, class Values>
void attend_pages(const DecodeCall& c, const DecodePart& part) {
  typedef PagedRows<typename Values::Number> Rows;
  const int64_t heads = part.kv_end - part.kv_begin;
  const auto rows = [&](const DecodeCache& cache, int64_t kv, const int64_t* places) {
    return Rows{static_cast<const typename Values::Number*>(cache.data) + kv * cache.of_head, places};
  };
  const bool even = is_intel();
  Places of[2];
  find(c, part, part.from, within(part.to - part.from), of[0]);
  for (int64_t from = part.from, block = 0; from < part.to; from += BLOCK, ++block) {
    const Places &now = of[block % 2], &next = of[1 - block % 2];
    const int count = within(part.to - from), following = within(part.to - (from + BLOCK));
    find(c, part, from + BLOCK, following, of[1 - block % 2]);
    for (int64_t nth = 0; nth < heads; ++nth) {
      const int64_t kv = part.kv_begin + nth;
      const Rows keys = rows(c.key, kv, now.keys), values = rows(c.value, kv, now.values);
      if (even) {
        Beside<typename Values::Number> beside;
        const Rows later_keys = rows(c.key, kv, next.keys), later_values = rows(c.value, kv, next.values);
        for (int j = 0; j < following; ++j) beside.keys[j] = later_keys[j], beside.values[j] = later_values[j];
        one_block<Kind, Values>(c, part, kv, keys, values, from, count, following == BLOCK ? &beside : nullptr);
        continue;
      }
      auto ahead = share_of(c, rows(c.key, part.kv_begin, next.keys), rows(c.value, part.kv_begin, next.values), following,
                            heads, nth, heads);
      one_block<Kind, Values>(c, part, kv, keys, values, from, count, &ahead);
    }
  }
}

template <class Kind, class Values>
void attend_numbers(const DecodeCall& c, const DecodePart& part) {
  if (part.pages != nullptr) return attend_pages<Kind, Values>(c, part);
  if (!is_intel()) return attend_dense<Kind, Values>(c, part);
  const int64_t heads = c.key.of_head < c.key.of_key ? 1 : part.kv_end - part.kv_begin;
  if (heads % 4 == 0) return attend_together<Kind, Values, 4>(c, part);
  if (heads % 2 == 0) return attend_together<Kind, Values, 2>(c, part);
  attend_together<Kind, Values, 1>(c, part);
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
                              static_cast<Ahead<EvenRows<Number>>*>(nullptr));
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
  attend_numbers<Kind, Values>(c, part);
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
  const float factor = reduce(c, h, sums, parts, stride);
  const int64_t number = (b * c.heads + h) * c.value_dim;
  if (parts == 0) {
    for (int64_t d = 0; d < c.value_dim; ++d) store_number(c.output, number + d, c.dtype, 0.0f);
  } else if (c.dtype == FLOAT32) {
    write<ValuesFloat32>(c, number, sums + LEADING, factor);
  } else if (c.dtype == BFLOAT16) {
    write<ValuesBFloat16>(c, number, sums + LEADING, factor);
  } else {
    write<ValuesFloat16>(c, number, sums + LEADING, factor);
  }
}

}  // namespace

extern const DecodeFunctions EASYTORCH_NAME(decode);
const DecodeFunctions EASYTORCH_NAME(decode) = {packing, pack, sums_row, decoded_bytes, attend, combine};
