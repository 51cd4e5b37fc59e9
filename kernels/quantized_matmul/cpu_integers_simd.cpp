// Products of few rows with integer codes, by dot products of bytes: x is rounded to integers of two or three bytes.
#include "cpu_integers.h"

#include "../cpu/vendor.h"

namespace {

#if defined(__AVX512VNNI__)

constexpr int MOST_ROWS_OF_X = 4;
// Rows of the weight that are read at once with one row of x, on Intel's.
constexpr int AT_ONCE = 4;
// How far ahead codes are prefetched, into the second cache; at least that far, of several rows at once.
constexpr int64_t AHEAD = 4096;

inline __m512i low_bits(__m512i words) { return _mm512_and_si512(words, _mm512_set1_epi8(15)); }
inline __m512i high_bits(__m512i words) { return low_bits(_mm512_srli_epi16(words, 4)); }
inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m512i joined(__m256i lower, __m256i upper) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(lower), upper, 1);
}
// Lane i: number `first + i / lanes * step`.
template <int LANES>
inline __m512i spread_pattern(int first, int step = 1) {
  alignas(64) int32_t lanes[WIDTH];
  for (int i = 0; i < WIDTH; ++i) lanes[i] = first + i / LANES * step;
  return _mm512_load_si512(lanes);
}

// A format's `Row` gives the codes of a step as unsigned bytes, VECTORS of them, and what each lane of their sums is
// multiplied by; SHIFTED ones also what the sums of x are multiplied by. ALIKE: lanes have one scale in all vectors. FULL: all
// of the step's columns are there.

// Scales beside the codes, by groups of columns.
template <StepShape const& SHAPE_, bool HAS_ZERO>
struct Grouped {
  static constexpr StepShape SHAPE = SHAPE_;
  static constexpr bool SHIFTED = HAS_ZERO;
  static constexpr bool ALIKE = SHAPE.alike();
  static constexpr float FACTOR = SHAPE.offset == 12 ? 0.5f : 1.0f;
  static constexpr int VECTORS = 2;

  explicit Grouped(const QuantizedProduct& p) : p(p) {
    const int64_t steps = (p.k + SHAPE.columns - 1) / SHAPE.columns;
    size = p.groups == 1 ? steps * SHAPE.columns : p.group_size;
    of_step = size < SHAPE.columns ? SHAPE.columns / size : 1;
    of_group = size < SHAPE.columns ? 1 : size / SHAPE.columns;
    stored = SHAPE.order == ODD_THEN_EVEN ? (p.k + 1) / 2 : p.k;
    const int blocks = static_cast<int>(size < SHAPE.columns ? size / 32 : 4);  // of 32 columns in a group
    alignas(64) int32_t lanes[2][WIDTH];
    for (int v = 0; v < 2; ++v)
      for (int i = 0; i < WIDTH; ++i) lanes[v][i] = (SHAPE.order == ODD_THEN_EVEN ? i / 4 : 2 * v + i / 8) / blocks;
    for (int v = 0; v < 2; ++v) patterns[v] = _mm512_load_si512(lanes[v]);
  }

  struct Row {
    inline void begin(const Grouped& of, int64_t n) {
      codes = of.p.data + n * of.p.row_bytes, scales = of.p.scale + n * of.p.scale_stride;
      zeros = HAS_ZERO ? of.p.zero + n * of.p.scale_stride : nullptr;
      until = of.of_group, group = 0;
    }
    template <bool FULL>
    __attribute__((always_inline)) inline void load(const Grouped& of, int64_t step, __m512i* out, Floats* scale, Floats* shift,
                                                          int64_t ahead) {
      constexpr int64_t BYTES = SHAPE.order == ODD_THEN_EVEN ? 64 : 128;
      const uint8_t* const at = codes + step * BYTES;
      const int64_t rest = of.stored - step * BYTES;
#pragma GCC unroll 4
      for (int64_t i = 0; i < BYTES; i += 64) __builtin_prefetch(at + i + ahead, 0, 2);
      if (SHAPE.order == ODD_THEN_EVEN) {
        const __m512i words =
            FULL || rest >= 64 ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi8((1ull << rest) - 1, at);
        out[0] = low_bits(words), out[1] = high_bits(words);
        if (SHAPE.offset == 12) {  // twice the numbers of FP4_LEVELS and 12
          const __m512i levels = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
#pragma GCC unroll 4
          for (int v = 0; v < 2; ++v) out[v] = _mm512_shuffle_epi8(levels, out[v]);
        }
      } else {
        const __m512i sign = _mm512_set1_epi8(-128);
        const uint64_t lower = FULL || rest >= 64 ? ~0ull : (1ull << rest) - 1;
        const uint64_t upper = FULL || rest >= 128 ? ~0ull : rest > 64 ? (1ull << (rest - 64)) - 1 : 0;
        out[0] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(lower, at), sign);
        out[1] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(upper, at + 64), sign);
      }
      if (of.of_step == 1) {
        scale[0] = scale[1] = broadcast(scales[group]);
        if (HAS_ZERO) *shift = multiply(scale[0], broadcast(-static_cast<float>(zeros[group])));
      } else {
        const int64_t left = FULL || of.p.groups - group >= of.of_step ? of.of_step : of.p.groups - group;
        const __mmask16 some = static_cast<__mmask16>((1u << left) - 1);
        const Floats numbers = _mm512_maskz_loadu_ps(some, scales + group);
#pragma GCC unroll 4
        for (int v = 0; v < 2; ++v) scale[v] = _mm512_permutexvar_ps(of.patterns[v], numbers);
        if (HAS_ZERO) {
          const __m512i offsets = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, zeros + group));
          const Floats shifts = multiply(numbers, multiply(broadcast(-1.0f), _mm512_cvtepi32_ps(offsets)));
          *shift = _mm512_permutexvar_ps(of.patterns[0], shifts);
        }
      }
      if (--until == 0) until = of.of_group, group += of.of_step;
    }

    const uint8_t* codes;
    const float* scales;
    const uint8_t* zeros;
    int64_t until, group;
  };

  const QuantizedProduct& p;
  int64_t size, of_step, of_group, stored;
  __m512i patterns[2];
};

// llama.cpp's blocks; see gguf_blocks.py.
alignas(64) constexpr uint8_t NO_BLOCK[64] = {};

inline uint16_t half_bits(const uint8_t* p) {
  uint16_t bits;
  memcpy(&bits, p, sizeof bits);
  return bits;
}

// Four blocks of 32 columns, BYTES each, with a float16 before their codes; beyond the row's end they are zeros.
template <int BYTES, bool FULL>
struct FourBlocks {
  FourBlocks(const uint8_t* row, int64_t step, int64_t blocks, int64_t ahead) {
    const uint8_t* const first = row + step * 4 * BYTES;
    const int64_t left = blocks - step * 4;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) at[i] = FULL || i < left ? first + i * BYTES : NO_BLOCK;
#pragma GCC unroll 4
    for (int i = 0; i < 4 * BYTES; i += 64) __builtin_prefetch(first + i + ahead, 0, 2);
  }
  // Their scales, in the first lanes.
  inline Floats scales() const {
    const uint64_t lower = half_bits(at[0]) | static_cast<uint32_t>(half_bits(at[1])) << 16;
    const uint64_t upper = half_bits(at[2]) | static_cast<uint32_t>(half_bits(at[3])) << 16;
    return _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi64_si128(static_cast<int64_t>(lower | upper << 32))));
  }
  const uint8_t* at[4];
};

struct OfQ8_0 {
  static constexpr StepShape SHAPE = SHAPE_OF_INT8;
  static constexpr bool SHIFTED = false;
  static constexpr bool ALIKE = SHAPE.alike();
  static constexpr float FACTOR = 1.0f;
  static constexpr int VECTORS = 2;
  explicit OfQ8_0(const QuantizedProduct& p) : p(p), patterns{spread_pattern<8>(0), spread_pattern<8>(2)} {}
  struct Row {
    inline void begin(const OfQ8_0& of, int64_t n) { codes = of.p.data + n * of.p.row_bytes; }
    template <bool FULL>
    __attribute__((always_inline)) inline void load(const OfQ8_0& of, int64_t step, __m512i* out, Floats* scale, Floats*,
                                                          int64_t ahead) {
      const FourBlocks<34, FULL> blocks(codes, step, of.p.k / 32, ahead);
      const __m512i sign = _mm512_set1_epi8(-128);
      const Floats scales = blocks.scales();
#pragma GCC unroll 4
      for (int v = 0; v < 2; ++v) {
        out[v] = _mm512_xor_si512(joined(load32(blocks.at[2 * v] + 2), load32(blocks.at[2 * v + 1] + 2)), sign);
        scale[v] = _mm512_permutexvar_ps(of.patterns[v], scales);
      }
    }
    const uint8_t* codes;
  };
  const QuantizedProduct& p;
  const __m512i patterns[2];
};

struct OfQ4_0 {
  static constexpr StepShape SHAPE = SHAPE_OF_Q4_0;
  static constexpr bool SHIFTED = false;
  static constexpr bool ALIKE = SHAPE.alike();
  static constexpr float FACTOR = 1.0f;
  static constexpr int VECTORS = 2;
  explicit OfQ4_0(const QuantizedProduct& p) : p(p), pattern(spread_pattern<4>(0)) {}
  struct Row {
    inline void begin(const OfQ4_0& of, int64_t n) { codes = of.p.data + n * of.p.row_bytes; }
    template <bool FULL>
    __attribute__((always_inline)) inline void load(const OfQ4_0& of, int64_t step, __m512i* out, Floats* scale, Floats*,
                                                          int64_t ahead) {
      const FourBlocks<18, FULL> blocks(codes, step, of.p.k / 32, ahead);
      const __m512i words = joined(_mm256_set_m128i(load16(blocks.at[1] + 2), load16(blocks.at[0] + 2)),
                                   _mm256_set_m128i(load16(blocks.at[3] + 2), load16(blocks.at[2] + 2)));
      out[0] = low_bits(words), out[1] = high_bits(words);
      scale[0] = scale[1] = _mm512_permutexvar_ps(of.pattern, blocks.scales());
    }
    const uint8_t* codes;
  };
  const QuantizedProduct& p;
  const __m512i pattern;
};

struct OfQ4K {
  static constexpr StepShape SHAPE = SHAPE_OF_Q4_K;
  static constexpr bool SHIFTED = true;
  static constexpr bool ALIKE = SHAPE.alike();
  static constexpr float FACTOR = 1.0f;
  static constexpr int VECTORS = 4;
  explicit OfQ4K(const QuantizedProduct& p)
      : p(p), patterns{spread_pattern<8>(0, 2), spread_pattern<8>(1, 2), spread_pattern<8>(4, 2), spread_pattern<8>(5, 2)},
        of_both(spread_pattern<8>(0)) {}
  struct Row {
    inline void begin(const OfQ4K& of, int64_t n) { codes = of.p.data + n * of.p.row_bytes; }
    template <bool FULL>
    __attribute__((always_inline)) inline void load(const OfQ4K& of, int64_t step, __m512i* out, Floats* scale, Floats* shift,
                                                          int64_t ahead) {
      const uint8_t* const block = codes + step * 144;
#pragma GCC unroll 4
      for (int i = 0; i < 144; i += 64) __builtin_prefetch(block + i + ahead, 0, 2);
      uint64_t first_two;
      uint32_t third, both;
      memcpy(&first_two, block + 4, sizeof first_two);
      memcpy(&third, block + 12, sizeof third);
      memcpy(&both, block, sizeof both);
      // lanes of 32 bits: scales and minima of the first four, then of the others
      const __m128i words = _mm_cvtsi64_si128(static_cast<int64_t>(first_two));
      const __m128i nibbles = _mm_cvtsi64_si128(static_cast<int64_t>(third | static_cast<uint64_t>(third >> 4) << 32));
      const __m128i lower = _mm_and_si128(words, _mm_set1_epi8(0x3f));
      const __m128i upper = _mm_or_si128(_mm_and_si128(nibbles, _mm_set1_epi8(0x0f)),
                                         _mm_and_si128(_mm_srli_epi32(words, 2), _mm_set1_epi8(0x30)));
      const __m128i eight_of_each = _mm_unpacklo_epi32(lower, upper);
      // d and, the other sign, dmin
      const Floats of_block = _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(both ^ 0x80000000u))));
      *shift = multiply(_mm512_permutexvar_ps(of.of_both, of_block),
                        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(eight_of_each)));
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) scale[v] = _mm512_permutexvar_ps(of.patterns[v], *shift);
#pragma GCC unroll 4
      for (int v = 0; v < 4; v += 2) {
        const __m512i some = _mm512_loadu_si512(block + 16 + 32 * v);
        out[v] = low_bits(some), out[v + 1] = high_bits(some);
      }
    }
    const uint8_t* codes;
  };
  const QuantizedProduct& p;
  const __m512i patterns[4], of_both;
};

struct OfQ6K {
  static constexpr StepShape SHAPE = SHAPE_OF_Q6_K;
  static constexpr bool SHIFTED = false;
  static constexpr bool ALIKE = SHAPE.alike();
  static constexpr float FACTOR = 1.0f;
  static constexpr int VECTORS = 4;
  explicit OfQ6K(const QuantizedProduct& p)
      : p(p), patterns{spread_pattern<4>(0), spread_pattern<4>(4), spread_pattern<4>(8), spread_pattern<4>(12)},
        left(joined(_mm256_set1_epi16(4), _mm256_set1_epi16(2))), right(joined(_mm256_set1_epi16(0), _mm256_set1_epi16(2))) {}
  struct Row {
    inline void begin(const OfQ6K& of, int64_t n) { codes = of.p.data + n * of.p.row_bytes; }
    template <bool FULL>
    __attribute__((always_inline)) inline void load(const OfQ6K& of, int64_t step, __m512i* out, Floats* scale, Floats*,
                                                          int64_t ahead) {
      const uint8_t* const block = codes + step * 210;
#pragma GCC unroll 4
      for (int i = 0; i < 210; i += 64) __builtin_prefetch(block + i + ahead, 0, 2);
      const Floats d = broadcast(float16_to_float(half_bits(block + 208)));
      const Floats scales = multiply(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(block + 192))));
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) scale[v] = _mm512_permutexvar_ps(of.patterns[v], scales);
      const __m512i two_bits = _mm512_set1_epi8(0x30);
#pragma GCC unroll 4
      for (int half = 0; half < 2; ++half) {
        const __m512i lower = _mm512_loadu_si512(block + 64 * half);
        const __m512i upper = _mm512_broadcast_i64x4(load32(block + 128 + 32 * half));
        // a | (b & c)
        out[2 * half] = _mm512_ternarylogic_epi32(low_bits(lower), _mm512_sllv_epi16(upper, of.left), two_bits, 0xf8);
        out[2 * half + 1] = _mm512_ternarylogic_epi32(high_bits(lower), _mm512_srlv_epi16(upper, of.right), two_bits, 0xf8);
      }
    }
    const uint8_t* codes;
  };
  const QuantizedProduct& p;
  const __m512i patterns[4], left, right;
};

// The sums of the products of VECTORS vectors of codes and of x, OF_VECTOR bytes apart, as integers.
template <int BYTES, int VECTORS, int64_t OF_VECTOR, bool HAS_OFFSET>
__attribute__((always_inline)) inline __m512i dot(const __m512i* codes, const char* x) {
  const auto add_products = [&](__m512i sums, int part) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
      sums = _mm512_dpbusd_epi32(sums, codes[v], _mm512_loadu_si512(x + v * OF_VECTOR + 64 * part));
    }
    return sums;
  };
  __m512i upper = add_products(_mm512_setzero_si512(), BYTES - 1);
  if (BYTES == 3) upper = add_products(_mm512_slli_epi32(upper, 8), 1);
  upper = _mm512_slli_epi32(upper, 8);
  if (!HAS_OFFSET) return add_products(upper, 0);
  return _mm512_add_epi32(upper, add_products(_mm512_loadu_si512(x + 64 * BYTES), 0));
}

// The columns of NR rows of the weight, from row n on.
template <class Format, int BYTES, int MR, int NR>
inline void tile_of_rows(const QuantizedProduct& p, const Format& format, int64_t n) {
  constexpr StepShape SHAPE = Format::SHAPE;
  constexpr int VECTORS = Format::VECTORS, JOINED = Format::ALIKE ? VECTORS : 1;
  constexpr int64_t SIZE = SHAPE.size(BYTES), OF_VECTOR = SHAPE.bytes_of_vector(BYTES);
  constexpr bool HAS_OFFSET = SHAPE.offset != 0 && !Format::SHIFTED;
  const int64_t steps = (p.k + SHAPE.columns - 1) / SHAPE.columns, full = p.k / SHAPE.columns;
  const char* x = static_cast<const char*>(p.x);
  const float* factors = reinterpret_cast<const float*>(x + steps * MR * SIZE);
  // as far as the same columns of rows that come later
  const int64_t at_once = NR * p.row_bytes;
  const int64_t ahead = NR == 1 || at_once == 0 ? AHEAD : (AHEAD + at_once - 1) / at_once * at_once;
  typename Format::Row rows[NR];
  Floats totals[NR][MR];
#pragma GCC unroll 4
  for (int j = 0; j < NR; ++j) {
    rows[j].begin(format, n + j);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) totals[j][i] = zeros();
  }
  const auto multiply_step = [&](int j, const __m512i* codes, const Floats* scale,
                                 Floats shift) __attribute__((always_inline)) {
    const char* its = x;
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i, its += SIZE) {
      Floats part = zeros();
      if (Format::SHIFTED) part = multiply(shift, load(reinterpret_cast<const float*>(its + VECTORS * OF_VECTOR)));
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v += JOINED) {
        const __m512i sums = dot<BYTES, JOINED, OF_VECTOR, HAS_OFFSET>(codes + v, its + v * OF_VECTOR);
        part = multiply_add(_mm512_cvtepi32_ps(sums), scale[v], part);
      }
      totals[j][i] = multiply_add(part, broadcast(factors[i]), totals[j][i]);
    }
  };
#pragma GCC unroll 1
  for (int64_t step = 0; step < full; ++step, x += MR * SIZE, factors += MR) {
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) {
      __m512i codes[VECTORS];
      Floats scale[VECTORS], shift;
      rows[j].template load<true>(format, step, codes, scale, &shift, ahead);
      multiply_step(j, codes, scale, shift);
    }
  }
  if (full < steps) {
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) {
      __m512i codes[VECTORS];
      Floats scale[VECTORS], shift;
      rows[j].template load<false>(format, full, codes, scale, &shift, ahead);
      multiply_step(j, codes, scale, shift);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < NR; ++j) {
    const float added = p.bias == nullptr ? 0.0f : load_number(p.bias, n + j, p.bias_dtype);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      store_number(p.y, i * p.n + n + j, p.y_dtype, sum(totals[j][i]) * Format::FACTOR + added);
    }
  }
}

// One row of the weight after another: two at a time share what is read of x, and came at 0.6 of the speed, as memory does not
// foresee two streams (4096x1024 of q8_0, one thread of a loaded Zen 4: 2.5 of a plain read in place of 1.5). Intel's have more
// loads in flight over several rows.
template <class Format, int BYTES, int MR>
void rows_of_x(const QuantizedProduct& p, int64_t begin, int64_t end) {
  const Format format(p);
  int64_t n = begin;
  if (MR == 1 && is_intel()) {
    for (; n + AT_ONCE <= end; n += AT_ONCE) tile_of_rows<Format, BYTES, MR, AT_ONCE>(p, format, n);
  }
  for (; n < end; ++n) tile_of_rows<Format, BYTES, MR, 1>(p, format, n);
}

template <class Format, int BYTES>
void product(const QuantizedProduct& p, int64_t begin, int64_t end) {
  switch (p.m) {
    case 1: return rows_of_x<Format, BYTES, 1>(p, begin, end);
    case 2: return rows_of_x<Format, BYTES, 2>(p, begin, end);
    case 3: return rows_of_x<Format, BYTES, 3>(p, begin, end);
    case 4: return rows_of_x<Format, BYTES, 4>(p, begin, end);
  }
}

template <int BYTES>
void of_format(const QuantizedProduct& p, int64_t begin, int64_t end) {
  switch (p.format) {
    case INT8: return product<Grouped<SHAPE_OF_INT8, false>, BYTES>(p, begin, end);
    case INT4:
      return p.zero == nullptr ? product<Grouped<SHAPE_OF_INT4, false>, BYTES>(p, begin, end)
                               : product<Grouped<SHAPE_OF_INT4, true>, BYTES>(p, begin, end);
    case FP4_E2M1: return product<Grouped<SHAPE_OF_FP4, false>, BYTES>(p, begin, end);
    case Q8_0: return product<OfQ8_0, BYTES>(p, begin, end);
    case Q4_0: return product<OfQ4_0, BYTES>(p, begin, end);
    case Q4_K: return product<OfQ4K, BYTES>(p, begin, end);
    case Q6_K: return product<OfQ6K, BYTES>(p, begin, end);
  }
}

bool takes(int64_t format, int32_t, int64_t m, int64_t group_size, int64_t groups) {
  if (m > MOST_ROWS_OF_X || format == NF4 || format == FP8_E4M3FN || format == FP8_E5M2 || format > Q6_K) return false;
  return format >= Q8_0 || groups == 1 || group_size == 32 || group_size == 64 || group_size % 128 == 0;
}

int64_t bytes(int64_t format, int32_t dtype, int64_t m, int64_t k) {
  return packed_size(shape_of(format), most_bytes_of(dtype), m, k);
}

bool pack(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, int64_t i, int64_t format, void* out) {
  return pack_integers(row, stride, dtype, k, m, i, shape_of(format), out);
}

void run(const QuantizedProduct* p, int64_t begin, int64_t end) {
  most_bytes_of(p->x_dtype) == 2 ? of_format<2>(*p, begin, end) : of_format<3>(*p, begin, end);
}

#else

bool takes(int64_t, int32_t, int64_t, int64_t, int64_t) { return false; }
int64_t bytes(int64_t, int32_t, int64_t, int64_t) { return 0; }
bool pack(const void*, int64_t, int32_t, int64_t, int64_t, int64_t, int64_t, void*) { return false; }
void run(const QuantizedProduct*, int64_t, int64_t) {}

#endif

}  // namespace

extern const CodesFunctions EASYTORCH_NAME(integer_codes);
const CodesFunctions EASYTORCH_NAME(integer_codes) = {takes, bytes, pack, run};
