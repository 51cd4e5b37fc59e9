// Products of few rows with an 8-bit or 4-bit weight, whose codes are decoded to float32 as they are accumulated.
#include "cpu_product.h"

#include "../cpu/numbers.h"
#include "../cpu/tile.h"
#include "../cpu/vendor.h"
#include "cpu_blocks.h"
#include "cpu_levels.h"

namespace {

// Columns that are decoded at once; groups of a weight start at multiples of it.
constexpr int STEP = 32;
constexpr int VECTORS = STEP / WIDTH;

// A format decodes STEP columns, in the order in which x is packed, or one column. The result is multiplied by FACTOR.
template <class Format>
inline void load_one_by_one(const uint8_t* row, int64_t c, Floats* out) {
  float numbers[STEP];
  for (int i = 0; i < STEP; ++i) numbers[i] = Format::one(row, c + Format::column(i));
  for (int v = 0; v < VECTORS; ++v) out[v] = load(numbers + v * WIDTH);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
inline __m128i load_bytes(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m128i low_codes(__m128i bytes) { return _mm_and_si128(bytes, _mm_set1_epi8(15)); }
inline __m128i high_codes(__m128i bytes) { return low_codes(_mm_srli_epi16(bytes, 4)); }
// The 16 numbers of unsigned bytes, and 16 of a table by their codes of four bits.
struct AsNumbers {
  inline Floats operator()(__m256i codes) const { return _mm256_cvtepi32_ps(codes); }
};
struct OfTable {
  explicit OfTable(const float* table) : lower(_mm256_loadu_ps(table)), upper(_mm256_loadu_ps(table + WIDTH)) {}
  inline Floats operator()(__m256i codes) const {  // an index uses the low three bits, the fourth chooses the half
    const __m256 of_lower = _mm256_permutevar8x32_ps(lower, codes), of_upper = _mm256_permutevar8x32_ps(upper, codes);
    return _mm256_blendv_ps(of_lower, of_upper, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  }
  __m256 lower, upper;
};
template <class Numbers>
inline void widen(__m128i bytes, const Numbers& numbers, Floats* out) {
  out[0] = numbers(_mm256_cvtepu8_epi32(bytes));
  out[1] = numbers(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
}
#endif

struct EightBits {
  static constexpr bool CHECKED = false;
  static constexpr bool SHIFTED = false;
  static constexpr float FACTOR = 1.0f;
  static constexpr int BYTES = STEP;
  static inline int column(int i) { return i; }
};

struct OfInt8 : EightBits {
  static inline float one(const uint8_t* row, int64_t c) { return static_cast<int8_t>(row[c]); }
  static inline void load(const uint8_t* row, int64_t c, Floats* out) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) out[v] = load_int8(reinterpret_cast<const int8_t*>(row) + c + v * WIDTH);
  }
};

// Two codes a byte, the even column in the upper bits: the even columns of a step come first. HAS_ZERO: 8 less a code for
// each group is added.
template <const float* LEVELS, bool HAS_ZERO>
struct OfFourBits {
  static constexpr bool CHECKED = false;
  static constexpr bool SHIFTED = HAS_ZERO;
  static constexpr float FACTOR = 1.0f;
  static constexpr int BYTES = STEP / 2;
  static inline int column(int i) { return i < 16 ? 2 * i : 2 * (i - 16) + 1; }
  static inline float one(const uint8_t* row, int64_t c) {
    return LEVELS[(c % 2 == 0 ? row[c / 2] >> 4 : row[c / 2]) & 15];
  }
  static inline void load(const uint8_t* row, int64_t c, Floats* out) {
#if defined(__AVX512F__)
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + c / 2)));
    const __m512 levels = _mm512_loadu_ps(LEVELS);  // an index uses the low four bits
    out[0] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), levels);
    out[1] = _mm512_permutexvar_ps(codes, levels);
#elif defined(__AVX2__)
    const __m128i codes = load_bytes(row + c / 2);
    const OfTable levels(LEVELS);
    widen(high_codes(codes), levels, out);
    widen(low_codes(codes), levels, out + 2);
#else
    load_one_by_one<OfFourBits>(row, c, out);
#endif
  }
};
typedef OfFourBits<INT4_LEVELS, false> OfInt4;
typedef OfFourBits<INT4_LEVELS, true> OfInt4WithZero;
typedef OfFourBits<NF4_LEVELS, false> OfNf4;
typedef OfFourBits<FP4_LEVELS, false> OfFp4;

#if defined(__AVX512F__)
inline void load_float16_pairs(__m512i bits, Floats* out) {
  out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
  out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
}
#elif defined(__AVX2__)
inline void load_float16_pairs(__m256i bits, Floats* out) {
  out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(bits));
  out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
}
#endif

// Less a factor of 256. With AVX-512 through bfloat16, whose lower byte is the lower four bits of a code and whose upper
// byte is one of sixteen; without through float16, whose exponent bias is 15 instead of 7, which is right for subnormal
// numbers too.
struct OfE4m3 : EightBits {
  static constexpr float FACTOR = 256.0f;
  static inline float one(const uint8_t* row, int64_t c) {
    const uint32_t magnitude = row[c] & 0x7fu;
    if (magnitude == 0x7fu) return from_bits(0x7fc00000u);
    return float16_to_float(static_cast<uint16_t>((row[c] & 0x80u) << 8 | magnitude << 7));
  }
#if defined(__AVX512F__)
  static constexpr bool CHECKED = true;
  // the even columns of a step come first
  static inline int column(int i) { return i < 16 ? 2 * i : 2 * (i - 16) + 1; }
  // Not less than LEAST_ODD, of bytes of no sign, where a code is 0, subnormal or NaN.
  static constexpr uint8_t LEAST_ODD = 254 - 16;
  static inline __m512i oddness(const uint8_t* row, int64_t c) {
    const __m512i codes = _mm512_loadu_si512(row + c);
    return _mm512_sub_epi8(_mm512_add_epi8(codes, codes), _mm512_set1_epi8(16));
  }
  static inline __m512i normal(const uint8_t* row, int64_t c, __m512i* moved) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + c));
    *moved = _mm512_slli_epi16(_mm512_cvtepu8_epi16(codes), 4);  // four bits in each byte
    const __m512i upper =
        _mm512_broadcast_i32x4(_mm_setr_epi8(56, 57, 58, 59, 60, 61, 62, 63, -72, -71, -70, -69, -68, -67, -66, -65));
    return _mm512_mask_shuffle_epi8(*moved, 0xaaaaaaaaaaaaaaaaull, upper, *moved);
  }
  static inline void widen(__m512i numbers, Floats* out) {
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16));
    out[1] = _mm512_castsi512_ps(_mm512_and_si512(numbers, _mm512_set1_epi32(-0x10000)));
  }
  // Of codes that are neither 0, subnormal nor NaN.
  static inline void load_normal(const uint8_t* row, int64_t c, Floats* out) {
    __m512i moved;
    widen(normal(row, c, &moved), out);
  }
  static inline void load_any(const uint8_t* row, int64_t c, Floats* out) {
    __m512i moved, numbers = normal(row, c, &moved);
    // 0 to 7, times 2**-17; normal numbers have their signs already
    const __m512i few =
        _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860));
    const __m512i signs = _mm512_slli_epi16(_mm512_and_si512(moved, _mm512_set1_epi16(0x800)), 4);
    numbers = _mm512_mask_permutexvar_epi16(numbers, is_small(moved), _mm512_srli_epi16(moved, 4), few);
    widen(_mm512_mask_mov_epi16(_mm512_or_si512(numbers, signs), is_nan(moved), _mm512_set1_epi16(0x7fc0)), out);
  }
  static inline __mmask32 is_small(__m512i moved) { return _mm512_testn_epi16_mask(moved, _mm512_set1_epi16(0x780)); }
  static inline __mmask32 is_nan(__m512i moved) {
    const __m512i all = _mm512_set1_epi16(0x7f0);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(moved, all), all);
  }
  static inline void load(const uint8_t* row, int64_t c, Floats* out) {
    __m512i moved;
    const __m512i numbers = normal(row, c, &moved);
    if (__builtin_expect((is_small(moved) | is_nan(moved)) != 0, 0)) return load_any(row, c, out);
    widen(numbers, out);
  }
#else
  static inline void load(const uint8_t* row, int64_t c, Floats* out) {
#if defined(__AVX2__)
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + c));
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_add_epi8(codes, codes), _mm256_set1_epi8(-2))) != 0) {
      return load_one_by_one<OfE4m3>(row, c, out);
    }
    for (int half = 0; half < 2; ++half) {
      const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(row + c + 16 * half)), 7);
      load_float16_pairs(_mm256_and_si256(bits, _mm256_set1_epi16(-0x4080)), out + 2 * half);
    }
#else
    load_one_by_one<OfE4m3>(row, c, out);
#endif
  }
#endif
};

struct OfE5m2 : EightBits {  // the upper half of a float16
  static inline float one(const uint8_t* row, int64_t c) {
    return float16_to_float(static_cast<uint16_t>(row[c] << 8));
  }
  static inline void load(const uint8_t* row, int64_t c, Floats* out) {
#if defined(__AVX512F__)
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + c));
    load_float16_pairs(_mm512_slli_epi16(_mm512_cvtepu8_epi16(codes), 8), out);
#elif defined(__AVX2__)
    for (int half = 0; half < 2; ++half) {
      const __m128i codes = load_bytes(row + c + 16 * half);
      load_float16_pairs(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8), out + 2 * half);
    }
#else
    load_one_by_one<OfE5m2>(row, c, out);
#endif
  }
};

// llama.cpp's blocks (gguf_blocks.py), whose scales stand among the codes. STEP columns are decoded together, so that the
// decoding of one column is that of its step.
inline float half_at(const uint8_t* p) { return float16_to_float(static_cast<uint16_t>(p[0] | p[1] << 8)); }

template <class Format>
struct Blocks {
  static constexpr bool CHECKED = false;
  static constexpr bool SHIFTED = false;
  static constexpr float FACTOR = 1.0f;
  static inline int column(int i) { return i; }
  static inline float one(const uint8_t* row, int64_t c) {
    float numbers[STEP];
    Format::decode(row, c / STEP * STEP, numbers);
    return numbers[c % STEP];
  }
};

struct OfQ8_0 : Blocks<OfQ8_0> {
  static constexpr int BYTES = 34;
  static inline void decode(const uint8_t* row, int64_t c, float* out) {
    const uint8_t* block = row + c / STEP * BYTES;
    const float d = half_at(block);
    for (int i = 0; i < STEP; ++i) out[i] = d * static_cast<int8_t>(block[2 + i]);
  }
  static inline void load(const uint8_t* row, int64_t c, Floats* out) {
    const uint8_t* block = row + c / STEP * BYTES;
    const Floats d = broadcast(half_at(block));
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      out[v] = multiply(d, load_int8(reinterpret_cast<const int8_t*>(block) + 2 + v * WIDTH));
    }
  }
};

struct OfQ4_0 : Blocks<OfQ4_0> {
  static constexpr int BYTES = 18;
  static inline void decode(const uint8_t* row, int64_t c, float* out) {
    const uint8_t* block = row + c / STEP * BYTES;
    const float d = half_at(block);
    for (int i = 0; i < 16; ++i) {
      out[i] = d * ((block[2 + i] & 15) - 8);
      out[16 + i] = d * ((block[2 + i] >> 4) - 8);
    }
  }
  static inline void load(const uint8_t* row, int64_t c, Floats* out) {
#if defined(__AVX512F__)
    const uint8_t* block = row + c / STEP * BYTES;
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 2)));
    const __m512 levels = _mm512_mul_ps(_mm512_loadu_ps(INT4_LEVELS), _mm512_set1_ps(half_at(block)));
    out[0] = _mm512_permutexvar_ps(codes, levels);  // an index uses the low four bits
    out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), levels);
#elif defined(__AVX2__)
    const uint8_t* block = row + c / STEP * BYTES;
    const __m128i codes = load_bytes(block + 2);
    const Floats d = broadcast(half_at(block)), eight = broadcast(8.0f);
    widen(low_codes(codes), AsNumbers(), out);
    widen(high_codes(codes), AsNumbers(), out + 2);
    for (int v = 0; v < VECTORS; ++v) out[v] = multiply(d, _mm256_sub_ps(out[v], eight));
#else
    float numbers[STEP];
    decode(row, c, numbers);
    for (int v = 0; v < VECTORS; ++v) out[v] = ::load(numbers + v * WIDTH);
#endif
  }
};

struct OfQ4K : Blocks<OfQ4K> {
  static constexpr int BYTES = 18;  // on average
  struct Step {
    const uint8_t* codes;
    int shift;
    float scale, offset;
  };
  static inline Step step(const uint8_t* row, int64_t c) {
    const uint8_t* block = row + c / 256 * 144;
    const uint8_t* scales = block + 4;
    const int j = static_cast<int>(c % 256 / STEP);
    const int scale = j < 4 ? scales[j] & 63 : (scales[j + 4] & 15) | scales[j - 4] >> 6 << 4;
    const int minimum = j < 4 ? scales[j + 4] & 63 : scales[j + 4] >> 4 | scales[j] >> 6 << 4;
    return {block + 16 + j / 2 * STEP, j % 2 * 4, half_at(block) * scale, -half_at(block + 2) * minimum};
  }
  static inline void decode(const uint8_t* row, int64_t c, float* out) {
    const Step s = step(row, c);
    for (int i = 0; i < STEP; ++i) out[i] = s.scale * (s.codes[i] >> s.shift & 15) + s.offset;
  }
  static inline void load(const uint8_t* row, int64_t c, Floats* out) {
#if defined(__AVX512F__)
    const Step s = step(row, c);
    const __m512 scale = _mm512_set1_ps(s.scale), offset = _mm512_set1_ps(s.offset);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m512i bytes =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s.codes + v * 16)));
      const __m512i codes =
          _mm512_and_si512(_mm512_srl_epi32(bytes, _mm_cvtsi32_si128(s.shift)), _mm512_set1_epi32(15));
      out[v] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(codes), offset);
    }
#elif defined(__AVX2__)
    const Step s = step(row, c);
    const Floats scale = broadcast(s.scale), offset = broadcast(s.offset);
    for (int half = 0; half < 2; ++half) {
      const __m128i bytes = load_bytes(s.codes + 16 * half);
      widen(s.shift == 0 ? low_codes(bytes) : high_codes(bytes), AsNumbers(), out + 2 * half);
    }
    for (int v = 0; v < VECTORS; ++v) out[v] = multiply_add(scale, out[v], offset);
#else
    float numbers[STEP];
    decode(row, c, numbers);
    for (int v = 0; v < VECTORS; ++v) out[v] = ::load(numbers + v * WIDTH);
#endif
  }
};

struct OfQ6K : Blocks<OfQ6K> {
  static constexpr int BYTES = 26;  // on average
  struct Step {
    const uint8_t *lower, *upper;
    int lower_shift, upper_shift;
    float scale[2];  // of 16 columns each
  };
  static inline Step step(const uint8_t* row, int64_t c) {
    const uint8_t* block = row + c / 256 * 210;
    const int half = static_cast<int>(c % 256 / 128), s = static_cast<int>(c % 128 / STEP);
    const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192) + half * 8 + s * 2;
    const float d = half_at(block + 208);
    return {block + half * 64 + s % 2 * STEP, block + 128 + half * STEP, s / 2 * 4, s * 2, {d * scales[0], d * scales[1]}};
  }
  static inline void decode(const uint8_t* row, int64_t c, float* out) {
    const Step s = step(row, c);
    for (int i = 0; i < STEP; ++i) {
      const int code = (s.lower[i] >> s.lower_shift & 15) | (s.upper[i] >> s.upper_shift & 3) << 4;
      out[i] = s.scale[i / 16] * (code - 32);
    }
  }
  static inline void load(const uint8_t* row, int64_t c, Floats* out) {
#if defined(__AVX512F__)
    const Step s = step(row, c);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m512i lower =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s.lower + v * 16)));
      const __m512i upper =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s.upper + v * 16)));
      const __m512i low =
          _mm512_and_si512(_mm512_srl_epi32(lower, _mm_cvtsi32_si128(s.lower_shift)), _mm512_set1_epi32(15));
      const __m512i high =
          _mm512_and_si512(_mm512_srl_epi32(upper, _mm_cvtsi32_si128(s.upper_shift)), _mm512_set1_epi32(3));
      const __m512i codes =
          _mm512_sub_epi32(_mm512_or_si512(low, _mm512_slli_epi32(high, 4)), _mm512_set1_epi32(32));
      out[v] = _mm512_mul_ps(_mm512_set1_ps(s.scale[v]), _mm512_cvtepi32_ps(codes));
    }
#elif defined(__AVX2__)
    const Step s = step(row, c);
    const __m128i shift = _mm_cvtsi32_si128(s.upper_shift), two_bits = _mm_set1_epi8(3);
    const Floats middle = broadcast(32.0f);
    for (int half = 0; half < 2; ++half) {
      const __m128i bytes = load_bytes(s.lower + 16 * half);
      const __m128i lower = s.lower_shift == 0 ? low_codes(bytes) : high_codes(bytes);
      const __m128i upper = _mm_and_si128(_mm_srl_epi16(load_bytes(s.upper + 16 * half), shift), two_bits);
      widen(_mm_or_si128(lower, _mm_slli_epi16(upper, 4)), AsNumbers(), out + 2 * half);
      const Floats scale = broadcast(s.scale[half]);
      for (int v = 2 * half; v < 2 * half + 2; ++v) out[v] = multiply(scale, _mm256_sub_ps(out[v], middle));
    }
#else
    float numbers[STEP];
    decode(row, c, numbers);
    for (int v = 0; v < VECTORS; ++v) out[v] = ::load(numbers + v * WIDTH);
#endif
  }
};

// Rows of the weight in a tile. With one row of x they are read one after another, as tile.h has it, but on Intel's: see
// one_row_of_x. AVX2 has registers for
// the sums of four rows of x and one of the weight, each of which is decoded once so.
#if defined(__AVX512F__)
constexpr int rows_of_tile(int rows_of_x) { return rows_of_x == 1 ? 1 : 4; }
#else
constexpr int rows_of_tile(int) { return 1; }
#endif
constexpr int MOST_ROWS_OF_X = 4;
constexpr int64_t AHEAD_BYTES = 1 << 13, AHEAD_OF_ONE = 1 << 11;

template <class Format>
void pack_row(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, float* out) {
  for (int64_t c = 0; c < k; c += STEP, out += m * STEP) {
    for (int i = 0; i < STEP; ++i) {
      const int64_t column = c + Format::column(i);
      out[i] = column < k ? load_number(row, column * stride, dtype) : 0.0f;
    }
  }
}

// sums[i * 4 + j] = x row i . weight row j.
template <class Format, int MR, int NR>
inline void quantized_tile(const QuantizedProduct& p, const float* x, const int64_t* rows, float* sums) {
  // With registers to spare a group is summed before it is scaled; otherwise every number is scaled.
  constexpr bool BY_GROUP = MR == 1;
  const uint8_t* codes[NR];
  Floats totals[MR][NR];
#pragma GCC unroll 4
  for (int j = 0; j < NR; ++j) codes[j] = p.data + rows[j] * p.row_bytes;
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) totals[i][j] = zeros();
  const int64_t ahead = NR > 1 ? (AHEAD_BYTES / (p.row_bytes + 1) / NR + 1) * NR * p.row_bytes : AHEAD_OF_ONE;
  for (int64_t group = 0; group < p.groups; ++group) {
    const int64_t begin = group * p.group_size, limit = begin + p.group_size, end = limit < p.k ? limit : p.k;
    Floats scales[NR], shifts[NR], parts[NR][VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) {
      const int64_t at = rows[j] * p.scale_stride + group;
      scales[j] = broadcast(Format::FACTOR * p.scale[at]);
      shifts[j] = broadcast(Format::SHIFTED ? 8.0f - p.zero[at] : 0.0f);
      for (int v = 0; v < VECTORS; ++v) parts[j][v] = zeros();
    }
    // a step of row j of the weight, and of x from `its` on
    const auto add_step = [&](int j, Floats* numbers, const float* its) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        if (Format::SHIFTED) numbers[v] = add(numbers[v], shifts[j]);
        if (BY_GROUP) {
          parts[j][v] = multiply_add(load(its + v * WIDTH), numbers[v], parts[j][v]);
          continue;
        }
        numbers[v] = multiply(numbers[v], scales[j]);
#pragma GCC unroll 4
        for (int i = 0; i < MR; ++i) {
          totals[i][j] = multiply_add(load(its + i * STEP + v * WIDTH), numbers[v], totals[i][j]);
        }
      }
    };
    int64_t c = begin;
#if defined(__AVX512F__)
    if constexpr (Format::CHECKED) {  // two steps of all rows, most of which have no code that takes longer
      for (; c + 2 * STEP <= end; c += 2 * STEP, x += 2 * p.m * STEP) {
        const auto add_steps = [&](auto load_step) __attribute__((always_inline)) {
#pragma GCC unroll 2
          for (int step = 0; step < 2; ++step) {
#pragma GCC unroll 4
            for (int j = 0; j < NR; ++j) {
              Floats numbers[VECTORS];
              load_step(codes[j], c + step * STEP, numbers);
              add_step(j, numbers, x + step * p.m * STEP);
            }
          }
        };
        __m512i odd = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int j = 0; j < NR; ++j) {
          odd = _mm512_max_epu8(odd, Format::oddness(codes[j], c));
          __builtin_prefetch(codes[j] + c + ahead, 0, NR > 1 ? 2 : 3);
        }
        const __m512i least = _mm512_set1_epi8(static_cast<char>(Format::LEAST_ODD));
        if (__builtin_expect(_mm512_cmpge_epu8_mask(odd, least) == 0, 1)) {
          add_steps(Format::load_normal);
        } else {
          add_steps(Format::load_any);
        }
      }
    }
#endif
    for (; c < end; c += STEP, x += p.m * STEP) {
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j) {
        Floats numbers[VECTORS];
        if (c + STEP <= end) {
          Format::load(codes[j], c, numbers);
          const int64_t byte = c / STEP * Format::BYTES;
          if (byte % 64 < Format::BYTES) __builtin_prefetch(codes[j] + byte + ahead, 0, NR > 1 ? 2 : 3);
        } else {  // the end of a row: nothing is read beyond it, and x is zero there
          float rest[STEP];
          for (int i = 0; i < STEP; ++i) {
            const int64_t column = c + Format::column(i);
            rest[i] = column < end ? Format::one(codes[j], column) : 0.0f;
          }
          for (int v = 0; v < VECTORS; ++v) numbers[v] = load(rest + v * WIDTH);
        }
        add_step(j, numbers, x);
      }
    }
    if (BY_GROUP) {
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) totals[0][j] = multiply_add(parts[j][v], scales[j], totals[0][j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) {
    sum4(totals[i][0], totals[i][NR > 1 ? 1 : 0], totals[i][NR > 2 ? 2 : 0], totals[i][NR > 3 ? 3 : 0], sums + 4 * i);
  }
}

template <class Format, int MR, int NR = rows_of_tile(MR)>
void rows_of_x(const QuantizedProduct& p, int64_t m, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; n += NR) {
    const int count = end - n < NR ? static_cast<int>(end - n) : NR;
    int64_t rows[NR];
    for (int j = 0; j < NR; ++j) rows[j] = n + (j < count ? j : count - 1);
    float sums[MR * 4];
    quantized_tile<Format, MR, NR>(p, static_cast<const float*>(p.x) + m * STEP, rows, sums);
    for (int j = 0; j < count; ++j) {
      const float added = p.bias == nullptr ? 0.0f : load_number(p.bias, n + j, p.bias_dtype);
      for (int i = 0; i < MR; ++i) store_number(p.y, (m + i) * p.n + n + j, p.y_dtype, sums[4 * i + j] + added);
    }
  }
}

// Four rows of the weight at once are more loads in flight on Intel's, and their sums do not wait for each other.
// 4096x1024 and 4096x4096, one thread of a Xeon (Emerald Rapids), of the time of one after another: nf4 0.54, e5m2 0.78.
template <class Format>
void one_row_of_x(const QuantizedProduct& p, int64_t m, int64_t begin, int64_t end) {
#if defined(__AVX512F__)
  if (is_intel()) return rows_of_x<Format, 1, 4>(p, m, begin, end);
#endif
  rows_of_x<Format, 1>(p, m, begin, end);
}

template <class Format>
void product(const QuantizedProduct& p, int64_t begin, int64_t end) {
  // with several parts of x, a few weight rows at a time, so that the next parts find them in the cache
  const int64_t block = p.m <= MOST_ROWS_OF_X ? end - begin : 4;
  for (int64_t n = begin; n < end; n += block) {
    const int64_t last = n + block < end ? n + block : end;
    for (int64_t m = 0; m < p.m; m += MOST_ROWS_OF_X) {
      switch (p.m - m < MOST_ROWS_OF_X ? p.m - m : MOST_ROWS_OF_X) {
        case 1: one_row_of_x<Format>(p, m, n, last); break;
        case 2: rows_of_x<Format, 2>(p, m, n, last); break;
        case 3: rows_of_x<Format, 3>(p, m, n, last); break;
        case 4: rows_of_x<Format, 4>(p, m, n, last); break;
      }
    }
  }
}

// Row n as numbers, STEP columns at a time.
template <class Format, class Numbers>
void decode_row(const QuantizedProduct& p, int64_t n, typename Numbers::Number* out) {
  const uint8_t* const codes = p.data + n * p.row_bytes;
  for (int64_t group = 0; group < p.groups; ++group) {
    const int64_t begin = group * p.group_size, limit = begin + p.group_size, end = limit < p.k ? limit : p.k;
    const int64_t at = n * p.scale_stride + group;
    const float factor = Format::FACTOR * p.scale[at], offset = Format::SHIFTED ? 8 - p.zero[at] : 0;
    const Floats scale = broadcast(factor), shift = broadcast(offset);
    for (int64_t c = begin; c < end; c += STEP) {
      if (c + STEP > end) {
        for (int64_t column = c; column < end; ++column) {
          store_number(out, column, Numbers::DTYPE, (Format::one(codes, column) + offset) * factor);
        }
        break;
      }
      Floats numbers[VECTORS];
      Format::load(codes, c, numbers);
      for (int v = 0; v < VECTORS; ++v) {
        if (Format::SHIFTED) numbers[v] = add(numbers[v], shift);
        numbers[v] = multiply(numbers[v], scale);
      }
      if (Format::column(1) == 1) {
        for (int v = 0; v < VECTORS; ++v) Numbers::write(out + c + v * WIDTH, numbers[v]);
        continue;
      }
#if defined(__AVX512F__)
      const __m512i lower = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
      const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(8));
      Numbers::write(out + c, _mm512_permutex2var_ps(numbers[0], lower, numbers[1]));
      Numbers::write(out + c + WIDTH, _mm512_permutex2var_ps(numbers[0], upper, numbers[1]));
#else
      float some[STEP];
      for (int v = 0; v < VECTORS; ++v) store(some + v * WIDTH, numbers[v]);
      for (int i = 0; i < STEP; ++i) store_number(out, c + Format::column(i), Numbers::DTYPE, some[i]);
#endif
    }
  }
}

template <class Format>
void decode_as(const QuantizedProduct& p, int64_t n, void* out, int32_t dtype) {
  dtype == FLOAT32 ? decode_row<Format, NumbersFloat32>(p, n, static_cast<float*>(out))
                   : decode_row<Format, NumbersBFloat16>(p, n, static_cast<uint16_t*>(out));
}

// visitor(Format()) of the product's format.
template <class Visitor>
void visit(const QuantizedProduct& p, const Visitor& visitor) {
  switch (p.format) {
    case INT8: return visitor(OfInt8());
    case INT4: return p.zero == nullptr ? visitor(OfInt4()) : visitor(OfInt4WithZero());
    case NF4: return visitor(OfNf4());
    case FP4_E2M1: return visitor(OfFp4());
    case FP8_E4M3FN: return visitor(OfE4m3());
    case FP8_E5M2: return visitor(OfE5m2());
    case Q8_0: return visitor(OfQ8_0());
    case Q4_0: return visitor(OfQ4_0());
    case Q4_K: return visitor(OfQ4K());
    case Q6_K: return visitor(OfQ6K());
    case Q4_1: return visitor(OfBlock<BlockQ4_1>());
    case Q5_0: return visitor(OfBlock<BlockQ5_0>());
    case Q5_1: return visitor(OfBlock<BlockQ5_1>());
    case IQ4_NL: return visitor(OfBlock<BlockIq4Nl>());
    case Q2_K: return visitor(OfBlock<BlockQ2K>());
    case Q3_K: return visitor(OfBlock<BlockQ3K>());
    case Q5_K: return visitor(OfBlock<BlockQ5K>());
    case IQ4_XS: return visitor(OfBlock<BlockIq4Xs>());
  }
}

void decode(const QuantizedProduct* p, int64_t n, void* out, int32_t dtype) {
  visit(*p, [&](auto format) { decode_as<decltype(format)>(*p, n, out, dtype); });
}

int64_t step() { return STEP; }

void pack(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, int64_t format, float* out) {
  if (format == INT4 || format == NF4 || format == FP4_E2M1) return pack_row<OfNf4>(row, stride, dtype, k, m, out);
  if (format == FP8_E4M3FN) return pack_row<OfE4m3>(row, stride, dtype, k, m, out);
  pack_row<OfInt8>(row, stride, dtype, k, m, out);
}

void run(const QuantizedProduct* p, int64_t begin, int64_t end) {
  visit(*p, [&](auto format) { product<decltype(format)>(*p, begin, end); });
}

}  // namespace

extern const QuantizedFunctions EASYTORCH_NAME(quantized);
const QuantizedFunctions EASYTORCH_NAME(quantized) = {step, pack, run, decode};
