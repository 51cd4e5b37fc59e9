// How rows of x are packed as integers for the dot products of bytes, and the columns that each format takes together.
#pragma once

#include "../cpu/numbers.h"
#include "cpu_product.h"

namespace {

#if defined(__AVX512VNNI__)

// The bytes of an integer of x, each signed: the error is 2**-15 of the largest number of a step with two, 2**-22 with
// three. Where no number is `greatest_ratio` times the others, that is within the rounding of the dtype.
constexpr int most_bytes_of(int32_t dtype) { return dtype == FLOAT32 ? 3 : 2; }
// The most that the largest number of a step may be times the mean of the others that are not 0: beside a larger one they
// would lose more than their dtype does, which counts where the weight is 0 under the large one.
constexpr float greatest_ratio(int32_t dtype) { return dtype == BFLOAT16 ? 256.0f : 48.0f; }
// The least that it may be times the mean of all but a few large numbers, which do not hide one another so. Activations behind a
// gate, most of which are small, stay below; in float16 the others may lose a few times what it rounds.
constexpr float LEAST_RATIO_OF_MOST = 256.0f;
// x becomes integers below 2**(exponent + 1): four products of a signed byte and such an integer fit 32 bits.
constexpr int exponent_of(int bytes) { return bytes == 3 ? 20 : 13; }
// A row whose largest number is below it is computed in float32: its factor would be no normal number.
constexpr float SMALLEST_OF_ROW = 1e-27f;

// Where the columns of a step stand in its vectors of 64 codes, in runs of adjacent ones.
enum ColumnOrder { IN_ORDER, ODD_THEN_EVEN, LOWER_THEN_UPPER_16, LOWER_THEN_UPPER_32 };

// What is packed for a step of one row: of each vector its bytes, the lowest first, and the numbers to begin its sums from,
// where lanes have one scale in all vectors those of the step with the first; sums of columns as float32 for formats with
// an offset of their own.
struct StepShape {
  int columns;
  int offset;  // that the codes, unsigned bytes, are too large by
  ColumnOrder order;
  enum Sums { NONE, OF_LANES, OF_32 } sums;

  constexpr int vectors() const { return columns / 64; }
  constexpr bool alike() const { return order == ODD_THEN_EVEN || order == LOWER_THEN_UPPER_16; }
  constexpr int64_t bytes_of_vector(int bytes) const { return 64 * (bytes + (offset != 0 ? 1 : 0)); }
  constexpr int64_t size(int bytes) const { return vectors() * bytes_of_vector(bytes) + (sums != NONE ? 64 : 0); }
};
constexpr StepShape SHAPE_OF_INT8 = {128, 128, IN_ORDER, StepShape::NONE};
constexpr StepShape SHAPE_OF_INT4 = {128, 8, ODD_THEN_EVEN, StepShape::OF_LANES};
constexpr StepShape SHAPE_OF_FP4 = {128, 12, ODD_THEN_EVEN, StepShape::NONE};
constexpr StepShape SHAPE_OF_Q4_0 = {128, 8, LOWER_THEN_UPPER_16, StepShape::NONE};
constexpr StepShape SHAPE_OF_Q4_K = {256, 0, LOWER_THEN_UPPER_32, StepShape::OF_32};
constexpr StepShape SHAPE_OF_Q6_K = {256, 32, IN_ORDER, StepShape::NONE};

inline StepShape shape_of(int64_t format) {
  switch (format) {
    case INT4: return SHAPE_OF_INT4;
    case FP4_E2M1: return SHAPE_OF_FP4;
    case Q4_0: return SHAPE_OF_Q4_0;
    case Q4_K: return SHAPE_OF_Q4_K;
    case Q6_K: return SHAPE_OF_Q6_K;
    default: return SHAPE_OF_INT8;
  }
}

// Steps of M rows side by side, then the factors of each step and row.
inline int64_t packed_size(StepShape shape, int bytes, int64_t m, int64_t k) {
  const int64_t steps = (k + shape.columns - 1) / shape.columns;
  return steps * m * (shape.size(bytes) + 4);
}

constexpr int MOST_COLUMNS = 256;

// `columns` numbers as float32, zeros beyond the first `count`.
inline void read_columns(const void* row, int64_t stride, int32_t dtype, int64_t at, int64_t count, int columns, float* out) {
  const int size = dtype == FLOAT32 ? 4 : 2;
  const char* const from = static_cast<const char*>(row) + at * stride * size;
  if (stride != 1 || count < columns) {
    for (int i = 0; i < columns; ++i) out[i] = i < count ? load_number(from, i * stride, dtype) : 0.0f;
    return;
  }
  for (int i = 0; i < columns; i += WIDTH) {
    const char* const some = from + i * size;
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(some);
    store(out + i, dtype == FLOAT32    ? load(reinterpret_cast<const float*>(some))
                   : dtype == BFLOAT16 ? load_bfloat16(halves)
                                       : load_float16(halves));
  }
}

// The largest magnitude, as its bits: those of infinity and NaN are larger than any number's.
inline uint32_t largest_bits(const float* numbers, int count) {
  __m512i most = _mm512_setzero_si512();
  for (int i = 0; i < count; i += WIDTH) {
    most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(numbers + i), _mm512_set1_epi32(0x7fffffff)));
  }
  return _mm512_reduce_max_epu32(most);
}

// Whether the largest of `count` numbers, given by its bits, is more than `ratio` times the mean of the others that are not 0;
// or, where a few are large, more than that (or LEAST_RATIO_OF_MOST) times the mean of the rest. Of the few are those that
// reach 8 times the mean that the rest may have; the rest are 7 of 8 or more.
inline bool stands_out(const float* numbers, int count, uint32_t largest, float ratio) {
  const float top = from_bits(largest), most = top / (ratio > LEAST_RATIO_OF_MOST ? ratio : LEAST_RATIO_OF_MOST);
  const Floats limit = broadcast(8.0f * most);
  Floats total = zeros(), total_of_small = zeros();
  int nonzero = 0, small = 0;
  for (int i = 0; i < count; i += WIDTH) {
    const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(numbers + i), _mm512_set1_epi32(0x7fffffff));
    const Floats magnitudes = _mm512_castsi512_ps(bits);
    const __mmask16 some = _mm512_test_epi32_mask(bits, bits);
    const __mmask16 below = _mm512_mask_cmp_ps_mask(some, magnitudes, limit, _CMP_LT_OQ);
    nonzero += __builtin_popcount(some), small += __builtin_popcount(below);
    total = add(total, magnitudes);
    total_of_small = _mm512_mask_add_ps(total_of_small, below, total_of_small, magnitudes);
  }
  if (top * static_cast<float>(nonzero - 1) > ratio * (sum(total) - top)) return true;
  return small > 0 && 8 * small >= 7 * (nonzero - 1) && sum(total_of_small) < most * static_cast<float>(small);
}

// The 64 bytes of vector v from those of the step's columns.
inline __m512i in_order_of(const int8_t* columns, ColumnOrder order, int v) {
  alignas(64) int8_t out[64];
  switch (order) {
    case IN_ORDER: return _mm512_loadu_si512(columns + 64 * v);
    case ODD_THEN_EVEN: {
      const int shift = v == 0 ? 8 : 0;
      for (int half = 0; half < 2; ++half) {
        const __m512i pairs = _mm512_srl_epi16(_mm512_loadu_si512(columns + 64 * half), _mm_cvtsi32_si128(shift));
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + 32 * half), _mm512_cvtepi16_epi8(pairs));
      }
      break;
    }
    case LOWER_THEN_UPPER_16:
      for (int block = 0; block < 4; ++block) memcpy(out + 16 * block, columns + 32 * block + 16 * v, 16);
      break;
    case LOWER_THEN_UPPER_32:
      for (int pair = 0; pair < 2; ++pair) memcpy(out + 32 * pair, columns + v / 2 * 128 + pair * 64 + v % 2 * 32, 32);
      break;
  }
  return _mm512_load_si512(out);
}

// One step of one row: `numbers` times `factor`, rounded.
inline void pack_step(const float* numbers, float factor, StepShape shape, int bytes, char* out) {
  alignas(64) int8_t parts[3][MOST_COLUMNS];
  for (int i = 0; i < shape.columns; i += WIDTH) {
    __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load(numbers + i), broadcast(factor)));
    for (int part = 0; part < bytes; ++part) {
      _mm_store_si128(reinterpret_cast<__m128i*>(parts[part] + i), _mm512_cvtepi32_epi8(whole));
      const __m512i lowest = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
      whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, lowest), 8);
    }
  }
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i of_lanes = _mm512_setzero_si512();
  for (int v = 0; v < shape.vectors(); ++v) {
    char* const vector = out + v * shape.bytes_of_vector(bytes);
    __m512i sums = _mm512_setzero_si512();
    for (int part = bytes - 1; part >= 0; --part) {
      const __m512i its = in_order_of(parts[part], shape.order, v);
      _mm512_storeu_si512(vector + 64 * part, its);
      sums = _mm512_dpbusd_epi32(_mm512_slli_epi32(sums, 8), ones, its);
    }
    of_lanes = _mm512_add_epi32(of_lanes, sums);
    if (shape.offset == 0) continue;
    const __m512i offset = _mm512_set1_epi32(-shape.offset), first = shape.alike() ? of_lanes : sums;
    _mm512_storeu_si512((shape.alike() ? out : vector) + 64 * bytes, _mm512_mullo_epi32(first, offset));
  }
  float* const sums = reinterpret_cast<float*>(out + shape.vectors() * shape.bytes_of_vector(bytes));
  if (shape.sums == StepShape::OF_LANES) store(sums, _mm512_cvtepi32_ps(of_lanes));
  if (shape.sums != StepShape::OF_32) return;
  store(sums, zeros());
  for (int block = 0; block < shape.columns / 32; ++block) {
    __m256i sum = _mm256_setzero_si256();
    for (int part = bytes - 1; part >= 0; --part) {
      const __m256i its = _mm256_load_si256(reinterpret_cast<const __m256i*>(parts[part] + 32 * block));
      sum = _mm256_dpbusd_epi32(_mm256_slli_epi32(sum, 8), _mm256_set1_epi8(1), its);
    }
    sums[8 + block] = static_cast<float>(_mm512_reduce_add_epi32(_mm512_zextsi256_si512(sum)));
  }
}

// Packs row i of M; false where a number is infinite or NaN or stands out, or all are tiny.
inline bool pack_integers(const void* row, int64_t stride, int32_t dtype, int64_t k, int64_t m, int64_t i, StepShape shape,
                          void* out) {
  const int bytes = most_bytes_of(dtype), exponent = exponent_of(bytes);
  const int64_t steps = (k + shape.columns - 1) / shape.columns, size = shape.size(bytes);
  char* const packed = static_cast<char*>(out);
  float* const factors = reinterpret_cast<float*>(packed + steps * m * size);
  uint32_t largest = 0;
  for (int64_t step = 0; step < steps; ++step) {
    alignas(64) float numbers[MOST_COLUMNS];
    read_columns(row, stride, dtype, step * shape.columns, k - step * shape.columns, shape.columns, numbers);
    const uint32_t bits = largest_bits(numbers, shape.columns);
    if (bits >= 0x7f800000u || stands_out(numbers, shape.columns, bits, greatest_ratio(dtype))) return false;
    largest = bits > largest ? bits : largest;
    // the power of two that brings the largest number to the exponent; a step of nothing but tiny numbers is rounded more
    int power = static_cast<int>(bits >> 23) - 127;
    power = power < -100 ? -100 : power;
    pack_step(numbers, from_bits(static_cast<uint32_t>(exponent - power + 127) << 23), shape, bytes,
              packed + (step * m + i) * size);
    factors[step * m + i] = from_bits(static_cast<uint32_t>(power - exponent + 127) << 23);
  }
  return largest == 0 || from_bits(largest) >= SMALLEST_OF_ROW;
}

#endif

}  // namespace
