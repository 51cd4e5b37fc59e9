// Products of few bfloat16 rows with codes that are decoded to bfloat16, exactly, for its dot product instructions.
#include "cpu_product.h"

#include "../cpu/tile.h"
#include "cpu_levels.h"

namespace {

#if defined(__AVX512BF16__)

// Bytes of codes that are decoded together.
constexpr int64_t BYTES = 64;
constexpr int MOST_ROWS_OF_X = 4;
// How far ahead codes are prefetched: decoding hides too little of the memory latency. Measured on one thread of a loaded
// Zen 4, 4096x1024, of a plain read: int4 1.60 without and 1.33 so, nf4 2.11 and 1.62, fp8 1.37 and 1.28; into the second
// cache alone 1.39, 2.09, 1.54.
constexpr int64_t AHEAD = 2048;

inline Floats dot(__m512i a, __m512i b, Floats total) { return _mm512_dpbf16_ps(total, (__m512bh)a, (__m512bh)b); }

// The numbers of 16 codes, as a table for VPERMW: twice, so that a fifth bit of an index does not count.
struct Table {
  uint16_t at[32];
};
inline Table table_of(const float* levels, bool rest) {
  Table table;
  for (int i = 0; i < 32; ++i) {
    const float level = levels[i % 16], nearest = bfloat16_to_float(float_to_bfloat16(level));
    table.at[i] = float_to_bfloat16(rest ? level - nearest : level);
  }
  return table;
}

// Four-bit codes: 128 columns in 32 words of four codes. A lane of a sum is over 8 adjacent columns, so that groups of
// 32 and more are lanes that share a scale. The columns of code j of all words are packed side by side.
constexpr int64_t COLUMNS = 2 * BYTES;
inline int64_t column_of(int64_t i) { return i % 32 * 4 + (i / 32 ^ 1); }

// The first `count` groups' numbers, spread over the lanes of their columns.
inline Floats spread(Floats numbers, int64_t group_size) {
  if (group_size >= COLUMNS) return _mm512_permutexvar_ps(_mm512_setzero_si512(), numbers);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, group_size == 32 ? 2 : 3), numbers);
}

// PARTS: tables that a level is the sum of.
template <int MR, int PARTS, bool HAS_ZERO>
void four_bits(const QuantizedProduct& p, const Table* tables, int64_t first, int64_t begin, int64_t end) {
  const int64_t steps = (p.k + COLUMNS - 1) / COLUMNS, row_bytes = (p.k + 1) / 2;
  // groups of a step, or steps of a group
  const int64_t size = p.groups == 1 ? steps * COLUMNS : p.group_size;
  const int64_t of_step = size < COLUMNS ? COLUMNS / size : 1, of_group = size < COLUMNS ? 1 : size / COLUMNS;
  const uint16_t* const rows = static_cast<const uint16_t*>(p.x) + first * COLUMNS;
  const float* const sums = reinterpret_cast<const float*>(static_cast<const uint16_t*>(p.x) + steps * p.m * COLUMNS) +
                            first * WIDTH;
  __m512i levels[PARTS];
  for (int part = 0; part < PARTS; ++part) levels[part] = _mm512_loadu_si512(tables[part].at);
  for (int64_t n = begin; n < end; ++n) {
    const uint8_t* const codes = p.data + n * p.row_bytes;
    const float* const scales = p.scale + n * p.scale_stride;
    Floats totals[MR];
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) totals[i] = zeros();
#pragma GCC unroll 1
    for (int64_t step = 0, group = 0, until = of_group; step < steps; ++step) {
      const int64_t left = p.groups - group < of_step ? p.groups - group : of_step;
      const __mmask16 some = static_cast<__mmask16>((1u << left) - 1);
      const Floats scale = of_step == 1 ? broadcast(scales[group]) : spread(_mm512_maskz_loadu_ps(some, scales + group), size);
      const int64_t rest = row_bytes - step * BYTES;
      __builtin_prefetch(codes + step * BYTES + AHEAD, 0, 3);
      const __m512i words = rest >= BYTES ? _mm512_loadu_si512(codes + step * BYTES)
                                          : _mm512_maskz_loadu_epi8((1ull << rest) - 1, codes + step * BYTES);
      Floats parts[MR];
#pragma GCC unroll 4
      for (int i = 0; i < MR; ++i) parts[i] = zeros();
      const uint16_t* const x = rows + step * p.m * COLUMNS;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512i indices = _mm512_srli_epi16(words, 4 * j);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; ++part) {
          const __m512i numbers = _mm512_permutexvar_epi16(indices, levels[part]);
#pragma GCC unroll 4
          for (int i = 0; i < MR; ++i) {
            parts[i] = dot(_mm512_loadu_si512(x + i * COLUMNS + j * 32), numbers, parts[i]);
          }
        }
      }
      if (HAS_ZERO) {
        const __m128i zeros_of_groups = _mm_maskz_loadu_epi8(some, p.zero + n * p.scale_stride + group);
        const Floats offsets = _mm512_sub_ps(broadcast(8.0f), _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(zeros_of_groups)));
        const Floats shift = spread(offsets, size);
#pragma GCC unroll 4
        for (int i = 0; i < MR; ++i) parts[i] = multiply_add(shift, load(sums + (step * p.m + i) * WIDTH), parts[i]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < MR; ++i) totals[i] = multiply_add(parts[i], scale, totals[i]);
      if (--until == 0) until = of_group, group += of_step;
    }
    const float added = p.bias == nullptr ? 0.0f : load_number(p.bias, n, p.bias_dtype);
    for (int i = 0; i < MR; ++i) store_number(p.y, (first + i) * p.n + n, p.y_dtype, sum(totals[i]) + added);
  }
}

// fp8: the exponent and mantissa of a code move to their places in bfloat16, the exponent's bias with them; subnormal codes,
// which are few, come from a table, and a row with infinities or NaN is computed number by number.
struct E4m3 {
  static constexpr int SHIFT = 4, MANTISSA = 3, BIAS = 127 - 7;
  static constexpr float SMALLEST = 1.0f / 512;
  static constexpr int NOT_FINITE = 0xfe;  // from here on, without the sign and one bit to the left
  static inline float number(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return from_bits(0x7fc00000u);
    const float size = exponent == 0 ? mantissa * SMALLEST
                                     : from_bits(static_cast<uint32_t>(exponent + BIAS) << 23 | static_cast<uint32_t>(mantissa) << 20);
    return code & 0x80 ? -size : size;
  }
};
struct E5m2 {
  static constexpr int SHIFT = 5, MANTISSA = 2, BIAS = 127 - 15;
  static constexpr float SMALLEST = 1.0f / 65536;
  static constexpr int NOT_FINITE = 0xf8;
  static inline float number(uint8_t code) { return float16_to_float(static_cast<uint16_t>(code << 8)); }
};

template <class Format>
constexpr int exponent_bits() {
  return 0x7f >> Format::MANTISSA << Format::MANTISSA;
}

template <class Format>
inline __m512i normal_numbers(__m256i codes) {
  const short kept = static_cast<short>(0x8000 | 0x7f << Format::SHIFT);
  const __m512i moved = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), Format::SHIFT);
  return _mm512_add_epi16(_mm512_and_si512(moved, _mm512_set1_epi16(kept)), _mm512_set1_epi16(Format::BIAS << 7));
}

template <class Format>
inline __m512i with_subnormal(__m512i numbers, __m256i codes, __m512i subnormal) {
  const __m512i wide = _mm512_cvtepi8_epi16(codes), signs = _mm512_and_si512(wide, _mm512_set1_epi16(-0x8000));
  const __mmask32 small = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(exponent_bits<Format>()));
  return _mm512_mask_blend_epi16(small, numbers, _mm512_or_si512(signs, _mm512_permutexvar_epi16(wide, subnormal)));
}

template <class Format>
float number_by_number(const QuantizedProduct& p, int64_t n, int64_t row) {
  const uint16_t* const x = static_cast<const uint16_t*>(p.x);
  const int64_t size = p.groups == 1 ? p.k : p.group_size;
  float total = 0.0f;
  for (int64_t c = 0; c < p.k; ++c) {
    const float number = Format::number(p.data[n * p.row_bytes + c]) * p.scale[n * p.scale_stride + c / size];
    total += number * bfloat16_to_float(x[(c / BYTES * p.m + row) * BYTES + c % BYTES]);
  }
  return total;
}

template <class Format, int MR>
void eight_bits(const QuantizedProduct& p, int64_t first, int64_t begin, int64_t end) {
  const uint16_t* const rows = static_cast<const uint16_t*>(p.x) + first * BYTES;
  uint16_t few[32] = {};
  for (int i = 0; i < 1 << Format::MANTISSA; ++i) few[i] = float_to_bfloat16(i * Format::SMALLEST);
  const __m512i subnormal = _mm512_loadu_si512(few);
  const int64_t size = p.groups == 1 ? p.k : p.group_size;
  for (int64_t n = begin; n < end; ++n) {
    const uint8_t* const codes = p.data + n * p.row_bytes;
    Floats totals[MR], parts[MR][2];
    __m512i largest = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) totals[i] = zeros();
    for (int64_t group = 0; group < p.groups; ++group) {
      const int64_t from = group * size, to = from + size < p.k ? from + size : p.k;
#pragma GCC unroll 4
      for (int i = 0; i < MR; ++i) parts[i][0] = parts[i][1] = zeros();
#pragma GCC unroll 1
      for (int64_t c = from; c < to; c += BYTES) {
        const __m512i some = to - c >= BYTES ? _mm512_loadu_si512(codes + c)
                                             : _mm512_maskz_loadu_epi8((1ull << (to - c)) - 1, codes + c);
        __builtin_prefetch(codes + c + AHEAD, 0, 3);
        largest = _mm512_max_epu8(largest, _mm512_add_epi8(some, some));
        const bool small = _mm512_testn_epi8_mask(some, _mm512_set1_epi8(exponent_bits<Format>())) != 0;
        const uint16_t* const x = rows + c / BYTES * p.m * BYTES;
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const __m256i its = half == 0 ? _mm512_castsi512_si256(some) : _mm512_extracti64x4_epi64(some, 1);
          __m512i numbers = normal_numbers<Format>(its);
          if (__builtin_expect(small, 0)) numbers = with_subnormal<Format>(numbers, its, subnormal);
#pragma GCC unroll 4
          for (int i = 0; i < MR; ++i) {
            parts[i][half] = dot(_mm512_loadu_si512(x + i * BYTES + half * 32), numbers, parts[i][half]);
          }
        }
      }
      const Floats scale = broadcast(p.scale[n * p.scale_stride + group]);
#pragma GCC unroll 4
      for (int i = 0; i < MR; ++i) totals[i] = multiply_add(add(parts[i][0], parts[i][1]), scale, totals[i]);
    }
    const __m512i limit = _mm512_set1_epi8(static_cast<char>(Format::NOT_FINITE));
    const bool odd = _mm512_cmpge_epu8_mask(largest, limit) != 0;
    const float added = p.bias == nullptr ? 0.0f : load_number(p.bias, n, p.bias_dtype);
    for (int i = 0; i < MR; ++i) {
      const float total = odd ? number_by_number<Format>(p, n, first + i) : sum(totals[i]);
      store_number(p.y, (first + i) * p.n + n, p.y_dtype, total + added);
    }
  }
}

template <int MR>
void rows_of_x(const QuantizedProduct& p, const Table* tables, int64_t first, int64_t begin, int64_t end) {
  switch (p.format) {
    case INT4:
      return p.zero == nullptr ? four_bits<MR, 1, false>(p, tables, first, begin, end)
                               : four_bits<MR, 1, true>(p, tables, first, begin, end);
    case NF4: return four_bits<MR, 2, false>(p, tables, first, begin, end);
    case FP4_E2M1: return four_bits<MR, 1, false>(p, tables, first, begin, end);
    case FP8_E4M3FN: return eight_bits<E4m3, MR>(p, first, begin, end);
    case FP8_E5M2: return eight_bits<E5m2, MR>(p, first, begin, end);
  }
}

bool is_four_bits(int64_t format) { return format == INT4 || format == NF4 || format == FP4_E2M1; }

bool takes(int64_t format, int32_t dtype, int64_t, int64_t group_size, int64_t groups) {
  if (dtype != BFLOAT16) return false;
  if (is_four_bits(format)) return groups == 1 || group_size == 32 || group_size == 64 || group_size % COLUMNS == 0;
  if (format != FP8_E4M3FN && format != FP8_E5M2) return false;
  return groups == 1 || group_size % BYTES == 0;
}

int64_t bytes(int64_t format, int32_t, int64_t m, int64_t k) {
  const int64_t columns = is_four_bits(format) ? COLUMNS : BYTES, steps = (k + columns - 1) / columns;
  return m * steps * (columns * 2 + (is_four_bits(format) ? WIDTH * 4 : 0));
}

// Steps of `columns` columns of all rows side by side, then, of four bits, the sums of the lanes of each.
bool pack(const void* row, int64_t stride, int32_t, int64_t k, int64_t m, int64_t i, int64_t format, void* out) {
  const uint16_t* const numbers = static_cast<const uint16_t*>(row);
  for (int64_t c = 0; c < k; ++c) {
    if ((numbers[c * stride] & 0x7f80) == 0x7f80) return false;
  }
  const bool four = is_four_bits(format);
  const int64_t columns = four ? COLUMNS : BYTES, steps = (k + columns - 1) / columns;
  uint16_t* const packed = static_cast<uint16_t*>(out);
  float* const sums = reinterpret_cast<float*>(packed + steps * m * columns);
  for (int64_t step = 0; step < steps; ++step) {
    uint16_t* const its = packed + (step * m + i) * columns;
    for (int64_t at = 0; at < columns; ++at) {
      const int64_t c = step * columns + (four ? column_of(at) : at);
      its[at] = c < k ? numbers[c * stride] : 0;
    }
    if (!four) continue;
    for (int64_t lane = 0; lane < WIDTH; ++lane) {
      float total = 0.0f;
      for (int64_t c = step * COLUMNS + lane * 8; c < step * COLUMNS + lane * 8 + 8 && c < k; ++c) {
        total += bfloat16_to_float(numbers[c * stride]);
      }
      sums[(step * m + i) * WIDTH + lane] = total;
    }
  }
  return true;
}

void run(const QuantizedProduct* p, int64_t begin, int64_t end) {
  const float* const levels = p->format == NF4 ? NF4_LEVELS : p->format == FP4_E2M1 ? FP4_LEVELS : INT4_LEVELS;
  const Table tables[2] = {table_of(levels, false), table_of(levels, true)};
  // with several parts of x, a few weight rows at a time, so that the next parts find them in the cache
  const int64_t block = p->m <= MOST_ROWS_OF_X ? end - begin : 4;
  for (int64_t n = begin; n < end; n += block) {
    const int64_t last = n + block < end ? n + block : end;
    for (int64_t m = 0; m < p->m; m += MOST_ROWS_OF_X) {
      switch (p->m - m < MOST_ROWS_OF_X ? p->m - m : MOST_ROWS_OF_X) {
        case 1: rows_of_x<1>(*p, tables, m, n, last); break;
        case 2: rows_of_x<2>(*p, tables, m, n, last); break;
        case 3: rows_of_x<3>(*p, tables, m, n, last); break;
        case 4: rows_of_x<4>(*p, tables, m, n, last); break;
      }
    }
  }
}

#else

bool takes(int64_t, int32_t, int64_t, int64_t, int64_t) { return false; }
int64_t bytes(int64_t, int32_t, int64_t, int64_t) { return 0; }
bool pack(const void*, int64_t, int32_t, int64_t, int64_t, int64_t, int64_t, void*) { return false; }
void run(const QuantizedProduct*, int64_t, int64_t) {}

#endif

}  // namespace

extern const CodesFunctions EASYTORCH_NAME(bfloat16_codes);
const CodesFunctions EASYTORCH_NAME(bfloat16_codes) = {takes, bytes, pack, run};
