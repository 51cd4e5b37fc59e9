// Products of few rows with integer codes whose rows are interleaved by 16: a dot product instruction sums the products of four
// columns for 16 rows of the weight, with one broadcast of x. No sum goes over lanes, and a scale is a vector.
//
// All is read in the order of its addresses. On Intel lines are prefetched 2 KiB ahead: 4096x1024, one thread of a loaded Xeon
// (Emerald Rapids), of a plain read, one row and four: int8 1.20 and 1.37 (without 1.35 and 1.71; rows one after another 1.16
// and 1.53), int4 in groups of 128 1.35 and 1.51 (1.70, 2.19; 1.22, 2.07), fp4 1.41 and 1.63 (1.85, 2.33; 1.31, 2.24), q4_0 1.34
// and 1.51 (1.70, 2.31; 1.30, 2.15), q4_k 1.36 and 1.71 (1.42, 1.70; 1.36, 2.32). On AMD's they are not: one thread of a loaded
// Zen 4, 4096x1024 of q4_k, bfloat16: 0.99 without, 1.05 with prefetches of 1 to 4 KiB into the L1 cache, 2.0 into L2; q4_0 2.9
// (with prefetches 1.4 to 2.7) where all scales of 16 rows stood before their codes, so that two streams lay in a page.
#include "cpu_interleaved.h"

#include "../cpu/rows.h"
#include "../cpu/vendor.h"
#include "cpu_integers.h"

namespace {

#if defined(__AVX512VNNI__)

constexpr int MOST_ROWS_OF_X = 2048;
constexpr int64_t LINE = 64, SCALES = 32;
// Columns that share a power of two in x.
constexpr int GROUP = 32;
// 32 columns of a row of x as integers of three bytes, each signed, times `factor`; of 16-bit x the lowest byte, which is
// what rounding to two leaves, is used only where a number stands out. `start`: what the sums of each 16 columns' products
// begin with, since codes are unsigned: less by the offset than they stand for.
struct Columns {
  int8_t bytes[2][GROUP];  // the highest, and the one below
  int32_t start[2];
  float factor, sum;  // sum: of the columns, of these bytes
};
struct LowestBytes {
  int8_t bytes[GROUP];
  int32_t start[2];
  float sum;
};

// Packed rows: how many bytes are used; for each 32 columns those of all rows; then their lowest bytes.
struct Packed {
  Packed(const void* at, int64_t m, int64_t k)
      : parts(static_cast<const int32_t*>(at)), columns(reinterpret_cast<const Columns*>(static_cast<const char*>(at) + LINE)),
        lowest(reinterpret_cast<const LowestBytes*>(columns + m * (k / GROUP))) {}
  const int32_t* parts;
  const Columns* columns;
  const LowestBytes* lowest;
};

// How many bytes ahead of what is read lines are prefetched; 0, the line itself, for none.
inline int64_t prefetch_distance() { return is_intel() ? 2048 : 0; }

// x becomes integers below 2**(EXPONENT + 1), whose upper two bytes are below 2**14: 32 products with a code fit 32 bits.
constexpr int EXPONENT = 21;

constexpr int offset_of(int64_t format) {
  return format == INT8 || format == Q8_0   ? 128
         : format == INT4 || format == Q4_0 ? 8
         : format == FP4_E2M1               ? 12
         : format == Q6_K                   ? 32
                                            : 0;
}

// The bytes of 32 columns where two of them lie in a byte of the codes, the even one in the upper bits: those of the lower
// bits come first.
inline __m256i odd_then_even(__m256i bytes) {
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14));
  return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(bytes, order), 0xd8);
}

bool takes(int64_t format, int32_t, int64_t m, int64_t group_size, int64_t groups) {
  if (m > MOST_ROWS_OF_X || easytorch::interleaved_blocks(format).block == 0) return false;
  return groups == 1 || group_size % GROUP == 0;
}

int64_t bytes(int64_t, int32_t, int64_t m, int64_t k) {
  return LINE + m * (k / GROUP) * static_cast<int64_t>(sizeof(Columns) + sizeof(LowestBytes));
}

// Packs row i of M; false where a number is infinite or NaN, stands out too far for three bytes, or all are tiny.
bool pack(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, int64_t i, int64_t format, void* out) {
  const Packed packed(out, m, k);
  int32_t& parts = *const_cast<int32_t*>(packed.parts);
  const int least = dtype == FLOAT32 ? 3 : 2, offset = offset_of(format);
  if (i == 0) parts = least;
  uint32_t largest = 0;
  for (int64_t group = 0; group < k / GROUP; ++group) {
    Columns& columns = const_cast<Columns*>(packed.columns)[group * m + i];
    LowestBytes& lowest = const_cast<LowestBytes*>(packed.lowest)[group * m + i];
    alignas(64) float numbers[GROUP];
    read_columns(row, stride, dtype, group * GROUP, GROUP, GROUP, numbers);
    const uint32_t bits = largest_bits(numbers, GROUP);
    if (bits >= 0x7f800000u) return false;
    if (stands_out(numbers, GROUP, bits, greatest_ratio(dtype))) {
      if (dtype == FLOAT32 || stands_out(numbers, GROUP, bits, 256.0f * greatest_ratio(dtype))) return false;
      parts = 3;
    }
    largest = bits > largest ? bits : largest;
    // the power of two that brings the largest number to the exponent; a group of nothing but tiny numbers is rounded more
    int power = static_cast<int>(bits >> 23) - 127;
    power = power < -90 ? -90 : power;
    const Floats times = broadcast(from_bits(static_cast<uint32_t>(EXPONENT - power + 127) << 23));
    int32_t sums[2][2];  // of the upper bytes and of the lowest one, for each 16 columns
    __m128i some[3][2];
    for (int half = 0; half < 2; ++half) {
      const __m512i all = _mm512_cvtps_epi32(_mm512_mul_ps(load(numbers + half * WIDTH), times));
      const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(all, 24), 24);
      const __m512i rest = _mm512_srai_epi32(_mm512_sub_epi32(all, low), 8);
      const __m512i middle = _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
      some[0][half] = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_sub_epi32(rest, middle), 8));
      some[1][half] = _mm512_cvtepi32_epi8(middle), some[2][half] = _mm512_cvtepi32_epi8(low);
      sums[0][half] = _mm512_reduce_add_epi32(rest), sums[1][half] = _mm512_reduce_add_epi32(low);
    }
    int8_t* const places[3] = {columns.bytes[0], columns.bytes[1], lowest.bytes};
    for (int part = 0; part < 3; ++part) {
      const __m256i in_order = _mm256_set_m128i(some[part][1], some[part][0]);
      const bool pairs = format == INT4 || format == FP4_E2M1;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(places[part]), pairs ? odd_then_even(in_order) : in_order);
    }
    columns.factor = from_bits(static_cast<uint32_t>(power - EXPONENT + 8 + 127) << 23);
    columns.sum = columns.factor * static_cast<float>(sums[0][0] + sums[0][1]);
    lowest.sum = columns.factor * (1.0f / 256) * static_cast<float>(sums[1][0] + sums[1][1]);
    if (format != Q6_K) sums[0][0] += sums[0][1], sums[1][0] += sums[1][1];
    for (int half = 0; half < 2; ++half) {
      columns.start[half] = -offset * sums[0][half], lowest.start[half] = -offset * sums[1][half];
    }
  }
  return largest == 0 || from_bits(largest) >= SMALLEST_OF_ROW;
}

inline __m512i line_at(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline __m512i low_bits(__m512i line) { return _mm512_and_si512(line, _mm512_set1_epi8(15)); }
inline __m512i high_bits(__m512i line) { return low_bits(_mm512_srli_epi16(line, 4)); }
inline Floats halves_at(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

// The products of 32 or 16 columns of a row of x, summed in the lanes of 16 rows of the weight.
template <int PARTS>
struct Sums {
  __m512i high, middle, lowest;
  inline void begin(const Columns& x, const LowestBytes& low, int half) {
    high = _mm512_setzero_si512(), middle = _mm512_set1_epi32(x.start[half]);
    if (PARTS == 3) lowest = _mm512_set1_epi32(low.start[half]);
  }
  static inline __m512i four(const int8_t* bytes) {
    int32_t word;
    memcpy(&word, bytes, sizeof word);
    return _mm512_set1_epi32(word);
  }
  // codes: of columns 4 * unit to 4 * unit + 3.
  inline void add(__m512i codes, const Columns& x, const LowestBytes& low, int unit) {
    high = _mm512_dpbusd_epi32(high, codes, four(x.bytes[0] + 4 * unit));
    middle = _mm512_dpbusd_epi32(middle, codes, four(x.bytes[1] + 4 * unit));
    if (PARTS == 3) lowest = _mm512_dpbusd_epi32(lowest, codes, four(low.bytes + 4 * unit));
  }
  inline Floats number() const {
    const Floats upper = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), middle));
    return PARTS == 2 ? upper : multiply_add(_mm512_cvtepi32_ps(lowest), broadcast(1.0f / 256), upper);
  }
};

// MR rows of x from row `first` of M on.
struct SomeRows {
  const Columns* columns;
  const LowestBytes* lowest;
  int64_t m, ahead;
  // The line `ahead` of one that is about to be read.
  inline void prefetch(const uint8_t* line) const { __builtin_prefetch(line + ahead); }
  inline const Columns& of(int64_t group, int i) const { return columns[group * m + i]; }
  inline const LowestBytes& low(int64_t group, int i) const { return lowest[group * m + i]; }
  template <int PARTS>
  inline Floats sum(int64_t group, int i) const {
    return broadcast(PARTS == 2 ? of(group, i).sum : of(group, i).sum + low(group, i).sum);
  }
};

// A group of 32 columns with one scale: lines of four bytes of 16 rows.
struct EightBits {
  static constexpr int LINES = 8, VECTORS = 1;
  static inline void codes(const uint8_t* line, __m512i* out) {
    out[0] = _mm512_xor_si512(line_at(line), _mm512_set1_epi8(-128));
  }
};
struct FourBits {
  static constexpr int LINES = 4, VECTORS = 2;
  static inline void codes(const uint8_t* line, __m512i* out) {
    out[0] = low_bits(line_at(line)), out[1] = high_bits(line_at(line));
  }
};
struct FourBitFloats {  // twice the numbers of FP4_LEVELS and 12
  static constexpr int LINES = 4, VECTORS = 2;
  static inline void codes(const uint8_t* line, __m512i* out) {
    const __m512i levels = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    FourBits::codes(line, out);
    out[0] = _mm512_shuffle_epi8(levels, out[0]), out[1] = _mm512_shuffle_epi8(levels, out[1]);
  }
};

template <class Bits, int PARTS, int MR>
__attribute__((always_inline)) inline void sum_group(const uint8_t* lines, const SomeRows& x, int64_t group, Floats* out) {
  Sums<PARTS> sums[MR];
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) sums[i].begin(x.of(group, i), x.low(group, i), 0);
#pragma GCC unroll 8
  for (int line = 0; line < Bits::LINES; ++line) {
    __m512i codes[Bits::VECTORS];
    x.prefetch(lines + line * LINE);
    Bits::codes(lines + line * LINE, codes);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < Bits::VECTORS; ++v) sums[i].add(codes[v], x.of(group, i), x.low(group, i), line + v * Bits::LINES);
  }
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) out[i] = sums[i].number();
}

// llama.cpp's blocks of 32 columns: the scales of two blocks, then the lines of both.
template <class Bits, int PARTS, int MR>
void halves(const QuantizedProduct& p, const uint8_t* rows, int64_t, const SomeRows& x, Floats* totals) {
  const int64_t groups = p.k / GROUP;
#pragma GCC unroll 1
  for (int64_t first = 0; first < groups; first += 2) {
    const int64_t last = first + 1 < groups ? first + 1 : first;
    const uint8_t *scales = rows, *lines = rows + (last - first + 1) * SCALES;
#pragma GCC unroll 1
    for (int64_t group = first; group <= last; ++group, scales += SCALES, lines += Bits::LINES * LINE) {
      Floats sums[MR];
      sum_group<Bits, PARTS, MR>(lines, x, group, sums);
      const Floats scale = halves_at(scales);
#pragma GCC unroll 4
      for (int i = 0; i < MR; ++i) {
        totals[i] = multiply_add(sums[i], multiply(scale, broadcast(x.of(group, i).factor)), totals[i]);
      }
    }
    rows = lines;
  }
}

// 16 vectors of 16 numbers each, turned: vector j has number j of each.
__attribute__((always_inline)) inline void transpose(Floats* v) {
  Floats pairs[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(v[i], v[i + 1]), pairs[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(pairs[i + j]), b = _mm512_castps_pd(pairs[i + 2 + j]);
      v[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), v[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const Floats a = _mm512_shuffle_f32x4(v[j], v[4 + j], 0x88), b = _mm512_shuffle_f32x4(v[j], v[4 + j], 0xdd);
    const Floats c = _mm512_shuffle_f32x4(v[8 + j], v[12 + j], 0x88), d = _mm512_shuffle_f32x4(v[8 + j], v[12 + j], 0xdd);
    v[j] = _mm512_shuffle_f32x4(a, c, 0x88), v[8 + j] = _mm512_shuffle_f32x4(a, c, 0xdd);
    v[4 + j] = _mm512_shuffle_f32x4(b, d, 0x88), v[12 + j] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

// What 16 rows of the weight are multiplied by, in a group of columns: by its scale, and with it 8 less a code for 0.
struct Scales {
  // Of up to 16 groups from `first` on.
  template <bool HAS_ZERO>
  inline void load(const QuantizedProduct& p, int64_t n, int64_t first) {
    const int64_t count = p.groups - first < WIDTH ? p.groups - first : WIDTH;
    const __mmask16 some = static_cast<__mmask16>((1u << count) - 1);
    Floats scales[WIDTH], shifts[WIDTH];
#pragma GCC unroll 16
    for (int r = 0; r < WIDTH; ++r) {
      const int64_t at = (n + r) * p.scale_stride + first;
      scales[r] = _mm512_maskz_loadu_ps(some, p.scale + at);
      if (HAS_ZERO) {
        const Floats zeros = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, p.zero + at)));
        shifts[r] = multiply(_mm512_sub_ps(broadcast(8.0f), zeros), scales[r]);
      }
    }
    transpose(scales);
    if (HAS_ZERO) transpose(shifts);
#pragma GCC unroll 16
    for (int j = 0; j < WIDTH; ++j) {
      scale[j] = scales[j];
      if (HAS_ZERO) shift[j] = shifts[j];
    }
  }
  // Of the one group of a row, or of all rows.
  template <bool HAS_ZERO>
  inline void load_one(const QuantizedProduct& p, int64_t n) {
    alignas(64) float zeros[WIDTH];
    for (int r = 0; HAS_ZERO && r < WIDTH; ++r) zeros[r] = 8.0f - static_cast<float>(p.zero[(n + r) * p.scale_stride]);
    scale[0] = p.scale_stride == 0 ? broadcast(p.scale[0]) : ::load(p.scale + n);
    if (HAS_ZERO) shift[0] = multiply(::load(zeros), scale[0]);
  }
  Floats scale[WIDTH], shift[WIDTH];
};

// Scales beside the codes, by groups of columns: rows of `groups` numbers.
template <class Bits, bool HAS_ZERO, int PARTS, int MR>
void grouped(const QuantizedProduct& p, const uint8_t* lines, int64_t n, const SomeRows& x, Floats* totals) {
  const int64_t all = p.k / GROUP, each = p.groups == 1 ? all : p.group_size / GROUP;
  Scales scales;
  int64_t group = 0;
#pragma GCC unroll 1
  for (int64_t j = 0; j < p.groups; ++j) {
    if (p.groups == 1) {
      scales.load_one<HAS_ZERO>(p, n);
    } else if (j % WIDTH == 0) {
      scales.load<HAS_ZERO>(p, n, j);
    }
    const int64_t end = group + each < all ? group + each : all;
    Floats parts[MR], added[MR];
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) parts[i] = zeros(), added[i] = zeros();
#pragma GCC unroll 1
    for (; group < end; ++group) {
      Floats sums[MR];
      sum_group<Bits, PARTS, MR>(lines + group * Bits::LINES * LINE, x, group, sums);
#pragma GCC unroll 4
      for (int i = 0; i < MR; ++i) {
        parts[i] = multiply_add(sums[i], broadcast(x.of(group, i).factor), parts[i]);
        if (HAS_ZERO) added[i] = add(added[i], x.template sum<PARTS>(group, i));
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      totals[i] = multiply_add(parts[i], scales.scale[j % WIDTH], totals[i]);
      if (HAS_ZERO) totals[i] = multiply_add(added[i], scales.shift[j % WIDTH], totals[i]);
    }
  }
}

// Byte j of each lane, unsigned.
inline Floats byte_of(__m512i words, int j) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(words, 8 * j), _mm512_set1_epi32(255)));
}

// Blocks of 256 columns; see gguf_blocks.py. Lines: d and dmin; three of scales and minima; 32 of codes.
template <int PARTS, int MR>
void q4_k(const QuantizedProduct& p, const uint8_t* lines, int64_t, const SomeRows& x, Floats* totals) {
  const __m512i six_bits = _mm512_set1_epi8(0x3f), upper_two = _mm512_set1_epi8(0x30);
#pragma GCC unroll 1
  for (int64_t block = 0; block < p.k / 256; ++block, lines += 36 * LINE) {
    const __m512i both = line_at(lines), first = line_at(lines + LINE), second = line_at(lines + 2 * LINE);
    const __m512i third = line_at(lines + 3 * LINE);
    const Floats d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both));
    const Floats dmin = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
    // of the first four groups, then of the others
    const __m512i scales[2] = {_mm512_and_si512(first, six_bits),
                               _mm512_or_si512(low_bits(third), _mm512_and_si512(_mm512_srli_epi16(first, 2), upper_two))};
    const __m512i minima[2] = {_mm512_and_si512(second, six_bits),
                               _mm512_or_si512(high_bits(third), _mm512_and_si512(_mm512_srli_epi16(second, 2), upper_two))};
    Floats parts[MR], lower[MR];
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) parts[i] = lower[i] = zeros();
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      const int64_t group = block * 8 + 2 * pair;
      Sums<PARTS> sums[2][MR];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
#pragma GCC unroll 4
        for (int i = 0; i < MR; ++i) sums[v][i].begin(x.of(group + v, i), x.low(group + v, i), 0);
#pragma GCC unroll 8
      for (int line = 0; line < 8; ++line) {
        const uint8_t* const at = lines + (4 + 8 * pair + line) * LINE;
        x.prefetch(at);
        const __m512i codes[2] = {low_bits(line_at(at)), high_bits(line_at(at))};
#pragma GCC unroll 4
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
          for (int v = 0; v < 2; ++v) sums[v][i].add(codes[v], x.of(group + v, i), x.low(group + v, i), line);
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const int at = 2 * pair + v;
        const Floats scale = byte_of(scales[at / 4], at % 4), minimum = byte_of(minima[at / 4], at % 4);
#pragma GCC unroll 4
        for (int i = 0; i < MR; ++i) {
          parts[i] = multiply_add(sums[v][i].number(), multiply(scale, broadcast(x.of(group + v, i).factor)), parts[i]);
          lower[i] = multiply_add(minimum, x.template sum<PARTS>(group + v, i), lower[i]);
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      totals[i] = _mm512_fnmadd_ps(dmin, lower[i], multiply_add(d, parts[i], totals[i]));
    }
  }
}

// Blocks of 256 columns: the d of two blocks, then the lines of both. Lines: 4 of scales; then, of every 16 bytes of lower bits,
// two of lower and one of upper bits, four times.
template <int PARTS, int MR>
void q6_k(const QuantizedProduct& p, const uint8_t* rows, int64_t, const SomeRows& x, Floats* totals) {
  const int64_t blocks = p.k / 256;
  const uint8_t *scales = rows, *lines = rows;
  const __m512i two_bits = _mm512_set1_epi8(0x30);
#pragma GCC unroll 1
  for (int64_t block = 0; block < blocks; ++block, lines += 52 * LINE) {
    scales = block % 2 == 0 ? lines : scales + SCALES;
    if (block % 2 == 0) lines += (block + 1 < blocks ? 2 : 1) * SCALES;
    Floats parts[MR];
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) parts[i] = zeros();
#pragma GCC unroll 1
    for (int part = 0; part < 4; ++part) {  // of 128 columns, those of 16 bytes of lower bits: 16 columns 32 apart each
      const int half = part / 2, sixteen = part % 2;
      const int64_t group = block * 8 + 4 * half;
      Sums<PARTS> sums[4][MR];
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v)
#pragma GCC unroll 4
        for (int i = 0; i < MR; ++i) sums[v][i].begin(x.of(group + v, i), x.low(group + v, i), sixteen);
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) {
        const uint8_t* const at = lines + (4 + 12 * part + 3 * line) * LINE;
        x.prefetch(at), x.prefetch(at + LINE), x.prefetch(at + 2 * LINE);
        const __m512i first = line_at(at), second = line_at(at + LINE), high = line_at(at + 2 * LINE);
        // a | (b & c)
        const __m512i codes[4] = {_mm512_ternarylogic_epi32(low_bits(first), _mm512_slli_epi16(high, 4), two_bits, 0xf8),
                                  _mm512_ternarylogic_epi32(low_bits(second), _mm512_slli_epi16(high, 2), two_bits, 0xf8),
                                  _mm512_ternarylogic_epi32(high_bits(first), high, two_bits, 0xf8),
                                  _mm512_ternarylogic_epi32(high_bits(second), _mm512_srli_epi16(high, 2), two_bits, 0xf8)};
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
#pragma GCC unroll 4
          for (int i = 0; i < MR; ++i) sums[v][i].add(codes[v], x.of(group + v, i), x.low(group + v, i), 4 * sixteen + line);
      }
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const int at = 8 * half + 2 * v + sixteen;  // of the 16 scales
        const __m512i words = line_at(lines + at / 4 * LINE);
        const __m512i to_the_left = _mm512_sll_epi32(words, _mm_cvtsi32_si128(24 - at % 4 * 8));
        const Floats scale = _mm512_cvtepi32_ps(_mm512_srai_epi32(to_the_left, 24));
#pragma GCC unroll 4
        for (int i = 0; i < MR; ++i) {
          parts[i] = multiply_add(sums[v][i].number(), multiply(scale, broadcast(x.of(group + v, i).factor)), parts[i]);
        }
      }
    }
    const Floats d = halves_at(scales);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) totals[i] = multiply_add(d, parts[i], totals[i]);
  }
}

// Rows of x whose sums are in registers at once.
constexpr int rows_at_once(int64_t format, int parts) { return format == Q6_K || (format == Q4_K && parts == 3) ? 2 : 4; }

// The products of MR rows of x, from row `m` on, with 16 rows of the weight.
template <int PARTS, int MR>
void sixteen_rows(const QuantizedProduct& p, int64_t n, int64_t m) {
  const Packed packed(p.x, p.m, p.k);
  const SomeRows x = {packed.columns + m, packed.lowest + m, p.m, prefetch_distance()};
  const uint8_t* const rows = p.data + n * p.row_bytes;
  Floats totals[MR];
  for (int i = 0; i < MR; ++i) totals[i] = zeros();
  switch (p.format) {
    case INT8: grouped<EightBits, false, PARTS, MR>(p, rows, n, x, totals); break;
    case INT4:
      p.zero == nullptr ? grouped<FourBits, false, PARTS, MR>(p, rows, n, x, totals)
                        : grouped<FourBits, true, PARTS, MR>(p, rows, n, x, totals);
      break;
    case FP4_E2M1: grouped<FourBitFloats, false, PARTS, MR>(p, rows, n, x, totals); break;
    case Q8_0: halves<EightBits, PARTS, MR>(p, rows, n, x, totals); break;
    case Q4_0: halves<FourBits, PARTS, MR>(p, rows, n, x, totals); break;
    case Q4_K:
      if constexpr (MR <= rows_at_once(Q4_K, PARTS)) q4_k<PARTS, MR>(p, rows, n, x, totals);
      break;
    case Q6_K:
      if constexpr (MR <= rows_at_once(Q6_K, PARTS)) q6_k<PARTS, MR>(p, rows, n, x, totals);
      break;
  }
  const Floats times = broadcast(p.format == FP4_E2M1 ? 0.5f : 1.0f);
  const Floats added = p.bias == nullptr ? zeros() : read_vector(number_at(p.bias, n, p.bias_dtype), WIDTH, p.bias_dtype);
  for (int i = 0; i < MR; ++i) {
    write_vector(number_at(p.y, (m + i) * p.n + n, p.y_dtype), WIDTH, p.y_dtype, multiply_add(totals[i], times, added));
  }
}

template <int PARTS>
void rows_of_x(const QuantizedProduct& p, int64_t n, int64_t m, int64_t count) {
  switch (count) {
    case 1: return sixteen_rows<PARTS, 1>(p, n, m);
    case 2: return sixteen_rows<PARTS, 2>(p, n, m);
    case 3: return sixteen_rows<PARTS, 3>(p, n, m);
    case 4: return sixteen_rows<PARTS, 4>(p, n, m);
  }
}

// Bytes of x that stay in the L2 cache beside 16 rows of the weight.
constexpr int64_t CACHED = 1 << 19;

// begin and end: multiples of 16. Later rows of x find the 16 rows in the cache, and the next 16 rows the rows of x.
void run(const QuantizedProduct* p, int64_t begin, int64_t end) {
  const bool three = *Packed(p->x, p->m, p->k).parts == 3;
  const int64_t most = rows_at_once(p->format, three ? 3 : 2), parts = (p->m + most - 1) / most;
  const int64_t fitting = CACHED / (most * (p->k / GROUP) * static_cast<int64_t>(sizeof(Columns))), block = fitting > 1 ? fitting : 1;
  for (int64_t first = 0; first < parts; first += block) {
    const int64_t last = first + block < parts ? first + block : parts;
    for (int64_t n = begin; n < end; n += WIDTH) {
      for (int64_t part = first; part < last; ++part) {
        const int64_t from = p->m * part / parts, count = p->m * (part + 1) / parts - from;
        three ? rows_of_x<3>(*p, n, from, count) : rows_of_x<2>(*p, n, from, count);
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

extern const CodesFunctions EASYTORCH_NAME(interleaved_codes);
const CodesFunctions EASYTORCH_NAME(interleaved_codes) = {takes, bytes, pack, run};
