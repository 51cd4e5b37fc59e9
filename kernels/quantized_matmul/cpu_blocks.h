// More of llama.cpp's blocks (gguf_blocks.py): a step of 32 columns becomes integers, and two scales with their offsets.
#pragma once

#include "../cpu/numbers.h"
#include "cpu_product.h"

namespace {

// Columns 0 to 15 of a step, and 16 to 31: code * scale + offset.
struct BlockStep {
  int8_t codes[32];
  float scale[2], offset[2];
};

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

inline Bytes16 bytes_at(const uint8_t* p) {
  Bytes16 bytes;
  memcpy(&bytes, p, sizeof bytes);
  return bytes;
}
inline void put_codes(BlockStep& s, Bytes16 first, Bytes16 second) {
  memcpy(s.codes, &first, 16);
  memcpy(s.codes + 16, &second, 16);
}
inline float half_of(const uint8_t* p) { return float16_to_float(static_cast<uint16_t>(p[0] | p[1] << 8)); }

// 16 in each byte whose bit is set in the 16 of p, the lowest first.
inline Bytes16 sixteens(const uint8_t* p) {
  const Bytes16 bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  typedef uint64_t Pair __attribute__((vector_size(16)));
  const Bytes16 bytes = (Bytes16)(Pair{p[0] * 0x0101010101010101u, p[1] * 0x0101010101010101u});
  return (Bytes16)((bytes & bit) != 0) & 16;
}

// The bits of `mask` in each byte, `shift` further up: as integers of 16 bits, which all instruction sets can shift.
inline Bytes16 bits_of(const uint8_t* p, int64_t shift, uint8_t mask) {
  typedef uint16_t Words8 __attribute__((vector_size(16)));
  return (Bytes16)((Words8)bytes_at(p) >> static_cast<uint16_t>(shift)) & mask;
}

// A level of iq4_nl for each code of four bits.
inline Bytes16 nonlinear(Bytes16 codes) {
  static const int8_t LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
#if defined(__AVX2__)
  return (Bytes16)_mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(LEVELS)), (__m128i)codes);
#else
  for (int i = 0; i < 16; ++i) codes[i] = static_cast<uint8_t>(LEVELS[codes[i]]);
  return codes;
#endif
}

inline void put_scale(BlockStep& s, float scale, float offset) {
  s.scale[0] = s.scale[1] = scale, s.offset[0] = s.offset[1] = offset;
}

// The scale (first) and minimum of step j of q4_k and q5_k, in 6 bits each.
inline int scale_of_k(const uint8_t* p, int64_t j) { return j < 4 ? p[j] & 63 : (p[j + 4] & 15) | p[j - 4] >> 6 << 4; }
inline int minimum_of_k(const uint8_t* p, int64_t j) { return j < 4 ? p[j + 4] & 63 : p[j + 4] >> 4 | p[j] >> 6 << 4; }

struct BlockQ4_1 {
  static constexpr int COLUMNS = 32, BYTES = 20;
  static inline void read(const uint8_t* block, int64_t, BlockStep& s) {
    const Bytes16 codes = bytes_at(block + 4);
    put_codes(s, codes & 15, bits_of(block + 4, 4, 15));
    put_scale(s, half_of(block), half_of(block + 2));
  }
};

struct BlockQ5_0 {
  static constexpr int COLUMNS = 32, BYTES = 22;
  static inline void read(const uint8_t* block, int64_t, BlockStep& s) {
    const Bytes16 codes = bytes_at(block + 6);
    put_codes(s, ((codes & 15) | sixteens(block + 2)) - 16, (bits_of(block + 6, 4, 15) | sixteens(block + 4)) - 16);
    put_scale(s, half_of(block), 0.0f);
  }
};

struct BlockQ5_1 {
  static constexpr int COLUMNS = 32, BYTES = 24;
  static inline void read(const uint8_t* block, int64_t, BlockStep& s) {
    const Bytes16 codes = bytes_at(block + 8);
    put_codes(s, (codes & 15) | sixteens(block + 4), bits_of(block + 8, 4, 15) | sixteens(block + 6));
    put_scale(s, half_of(block), half_of(block + 2));
  }
};

struct BlockIq4Nl {
  static constexpr int COLUMNS = 32, BYTES = 18;
  static inline void read(const uint8_t* block, int64_t, BlockStep& s) {
    put_codes(s, nonlinear(bits_of(block + 2, 0, 15)), nonlinear(bits_of(block + 2, 4, 15)));
    put_scale(s, half_of(block), 0.0f);
  }
};

struct BlockIq4Xs {
  static constexpr int COLUMNS = 256, BYTES = 136;
  static inline void read(const uint8_t* block, int64_t step, BlockStep& s) {
    const int upper = block[2] | block[3] << 8, lower = block[4 + step / 2] >> (step % 2 * 4) & 15;
    const uint8_t* codes = block + 8 + step * 16;
    put_codes(s, nonlinear(bits_of(codes, 0, 15)), nonlinear(bits_of(codes, 4, 15)));
    put_scale(s, half_of(block) * ((lower | (upper >> (2 * step) & 3) << 4) - 32), 0.0f);
  }
};

struct BlockQ2K {
  static constexpr int COLUMNS = 256, BYTES = 84;
  static inline void read(const uint8_t* block, int64_t step, BlockStep& s) {
    const uint8_t *codes = block + 16 + step / 4 * 32, *scales = block + step * 2;
    put_codes(s, bits_of(codes, step % 4 * 2, 3), bits_of(codes + 16, step % 4 * 2, 3));
    const float d = half_of(block + 80), minimum = half_of(block + 82);
    for (int i = 0; i < 2; ++i) s.scale[i] = d * (scales[i] & 15), s.offset[i] = -minimum * (scales[i] >> 4);
  }
};

struct BlockQ3K {
  static constexpr int COLUMNS = 256, BYTES = 110;
  static inline void read(const uint8_t* block, int64_t step, BlockStep& s) {
    const uint8_t *codes = block + 32 + step / 4 * 32, *scales = block + 96;
    const float d = half_of(block + 108);
    for (int i = 0; i < 2; ++i) {
      const Bytes16 high = bits_of(block + 16 * i, step, 1), twice = high + high;
      const Bytes16 code = bits_of(codes + 16 * i, step % 4 * 2, 3) + twice + twice - 4;  // 4 less without the bit
      memcpy(s.codes + 16 * i, &code, 16);
      const int64_t at = step * 2 + i;
      const int low = at < 8 ? scales[at] & 15 : scales[at - 8] >> 4, upper = scales[8 + at % 4] >> (at / 4 * 2) & 3;
      s.scale[i] = d * ((low | upper << 4) - 32), s.offset[i] = 0.0f;
    }
  }
};

// 16 in each byte where bit `step` of p's is set.
inline Bytes16 fifth(const uint8_t* p, int64_t step) { return (Bytes16)(bits_of(p, step, 1) != 0) & 16; }

struct BlockQ5K {
  static constexpr int COLUMNS = 256, BYTES = 176;
  static inline void read(const uint8_t* block, int64_t step, BlockStep& s) {
    const uint8_t* codes = block + 48 + step / 2 * 32;
    put_codes(s, bits_of(codes, step % 2 * 4, 15) | fifth(block + 16, step),
              bits_of(codes + 16, step % 2 * 4, 15) | fifth(block + 32, step));
    put_scale(s, half_of(block) * scale_of_k(block + 4, step), -half_of(block + 2) * minimum_of_k(block + 4, step));
  }
};

// A block as a format of cpu_product_simd.cpp.
template <class Block>
struct OfBlock {
  static constexpr bool CHECKED = false;
  static constexpr bool SHIFTED = false;
  static constexpr float FACTOR = 1.0f;
  static constexpr int BYTES = (Block::BYTES * 32 + Block::COLUMNS - 1) / Block::COLUMNS;  // of 32 columns, on average
  static inline int column(int i) { return i; }
  static inline BlockStep step(const uint8_t* row, int64_t c) {
    BlockStep s;
    Block::read(row + c / Block::COLUMNS * Block::BYTES, c % Block::COLUMNS / 32, s);
    return s;
  }
  static inline float one(const uint8_t* row, int64_t c) {
    const BlockStep s = step(row, c);
    const int i = static_cast<int>(c % 32);
    return s.scale[i / 16] * s.codes[i] + s.offset[i / 16];
  }
  static inline void load(const uint8_t* row, int64_t c, Floats* out) {
    const BlockStep s = step(row, c);
#pragma GCC unroll 4
    for (int v = 0; v < 32 / WIDTH; ++v) {
      const int half = v * WIDTH / 16;
      out[v] = multiply_add(broadcast(s.scale[half]), load_int8(s.codes + v * WIDTH), broadcast(s.offset[half]));
    }
  }
};

}  // namespace
