// The loops of absorbed latent attention. A block of keys is brought together, latent and rotated part, in the form that
// its products take, once for all heads and tokens.
#include "cpu_latents.h"

#include "../cpu/numbers.h"

// Keys that are brought together: as many as tiles of three divide, so that sums are read and written less often than with
// decode's 16. All heads share a block, so what counts is the arithmetic, not how soon memory is read.
#define EASYTORCH_BLOCK 48
#include "../decode/cpu_attention_blocks.h"

namespace {

// ---- x (M, K) @ matrix (K, N): the matrix is read row by row, in strips of columns whose sums stay in registers

#if defined(__AVX512F__)
constexpr int SUMS = 16;
#else
constexpr int SUMS = 8;
#endif

template <class Numbers, int MR, int NV>
inline void strip(const LatentProduct& p, int64_t row, int64_t column) {
  typedef typename Numbers::Number Number;
  const Number* matrix = static_cast<const Number*>(p.matrix) + column;
  const float* x = p.x + row * p.ldx;
  Floats sums[MR][NV];
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) sums[i][v] = zeros();
  for (int64_t k = 0; k < p.k; ++k, matrix += p.ldm) {
    // strips of rows are too narrow for the hardware's prefetcher
#pragma GCC unroll 16
    for (int line = 0; line < NV * WIDTH; line += 64 / static_cast<int>(sizeof(Number))) {
      __builtin_prefetch(matrix + 8 * p.ldm + line, 0, 2);
    }
    Floats one[MR];
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) one[i] = broadcast(x[i * p.ldx + k]);
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      const Floats numbers = Numbers::read(matrix + v * WIDTH);
#pragma GCC unroll 4
      for (int i = 0; i < MR; ++i) sums[i][v] = multiply_add(one[i], numbers, sums[i][v]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) store(p.out + (row + i) * p.ldo + column + v * WIDTH, sums[i][v]);
}

// The last columns, fewer than a vector.
template <class Numbers>
void last_columns(const LatentProduct& p, int64_t column) {
  typedef typename Numbers::Number Number;
  for (int64_t i = 0; i < p.m; ++i) {
    const Number* matrix = static_cast<const Number*>(p.matrix) + column;
    Floats sum = zeros();
    for (int64_t k = 0; k < p.k; ++k, matrix += p.ldm) {
      sum = multiply_add(broadcast(p.x[i * p.ldx + k]), read_some<Numbers>(matrix, p.n - column), sum);
    }
    float numbers[WIDTH];
    store(numbers, sum);
    memcpy(p.out + i * p.ldo + column, numbers, static_cast<size_t>(p.n - column) * sizeof(float));
  }
}

template <class Numbers, int MR>
void rows(const LatentProduct& p, int64_t row) {
  constexpr int NV = SUMS / MR;
  int64_t column = 0;
  for (; column + NV * WIDTH <= p.n; column += NV * WIDTH) strip<Numbers, MR, NV>(p, row, column);
  for (; column + WIDTH <= p.n; column += WIDTH) strip<Numbers, MR, 1>(p, row, column);
}

template <class Numbers>
void absorb_as(const LatentProduct& p) {
  int64_t row = 0;
  for (; row + 4 <= p.m; row += 4) rows<Numbers, 4>(p, row);
  for (; row + 2 <= p.m; row += 2) rows<Numbers, 2>(p, row);
  for (; row < p.m; ++row) rows<Numbers, 1>(p, row);
  if (p.n % WIDTH != 0) last_columns<Numbers>(p, p.n / WIDTH * WIDTH);
}

void absorb(const LatentProduct* p) {
  switch (p->dtype) {
    case FLOAT32: return absorb_as<NumbersFloat32>(*p);
    case BFLOAT16: return absorb_as<NumbersBFloat16>(*p);
    case FLOAT16: return absorb_as<NumbersFloat16>(*p);
  }
}

// ---- attention over the latents

// How a number of the cache lies in the row that is made of it: in float32, or as it is.
template <class Numbers>
struct Widened {
  typedef OfFloat32 Kind;
  typedef ValuesFloat32 Values;
  typedef typename Numbers::Number Number;
  static inline void copy(const Number* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) store(to + i, Numbers::read(from + i));
    for (; i < count; ++i) to[i] = load_number(from, i, Numbers::DTYPE);
  }
};
#if defined(__AVX512BF16__)
struct AsBFloat16 {
  typedef OfBFloat16Pairs Kind;
  typedef ValuesBFloat16 Values;
  typedef uint16_t Number;
  static inline void copy(const Number* from, int64_t count, uint16_t* to) {
    memcpy(to, from, static_cast<size_t>(count) * sizeof(Number));
  }
};
#endif

// Whether the mask hides a block of keys from every query of a part.
bool hides_block(const DecodeCall& c, const DecodePart& part, int64_t from, int count) {
  const ScoreMatrix& matrix = c.rules.mask;
  if (matrix.data == nullptr) return false;
  const int64_t first = part.query / c.heads, last = (part.query + part.group - 1) / c.heads;
  for (int64_t i = first; i <= (matrix.of_row == 0 ? first : last); ++i) {
    for (int64_t h = 0; h < (matrix.of_head == 0 ? 1 : c.heads); ++h) {
      const uint8_t* const mask = static_cast<const uint8_t*>(matrix.data) + place_of(matrix, part.b, h, i, from);
      for (int j = 0; j < count; ++j)
        if (mask[j * matrix.of_column] != 0) return false;
    }
  }
  return true;
}

template <class As>
void attend_as(const DecodeCall& c, const DecodePart& part) {
  typedef typename As::Number Number;
  typedef typename As::Values::Number Made;
  const int64_t row = sums_row(c.value_dim), rope_dim = c.dim - c.value_dim;
  for (int64_t i = 0; i < part.group; ++i) {
    memset(part.sums + i * row, 0, static_cast<size_t>(row) * sizeof(float));
    part.sums[i * row] = HIDDEN;
  }
  Made* const made = reinterpret_cast<Made*>(part.decoded);
  const EvenRows<Made> keys{made, c.dim};
  const auto rows = [](const DecodeCache& cache, const int64_t* places) {
    return PagedRows<Number>{static_cast<const Number*>(cache.data), places};
  };
  constexpr int64_t size = sizeof(Number);
  Places of[2];
  find(c, part, part.from, within(part.to - part.from), of[0]);
  for (int64_t from = part.from, block = 0; from < part.to; from += BLOCK, ++block) {
    const Places &now = of[block % 2], &next = of[1 - block % 2];
    const int count = within(part.to - from), following = within(part.to - from - BLOCK);
    find(c, part, from + BLOCK, following, of[1 - block % 2]);
    if (hides_block(c, part, from, count)) continue;
    const PagedRows<Number> latents = rows(c.key, now.keys), ropes = rows(c.value, now.values);
    for (int j = 0; j < count; ++j) {
      As::copy(latents[j], c.value_dim, made + j * c.dim);
      As::copy(ropes[j], rope_dim, made + j * c.dim + c.value_dim);
    }
    Ahead<PagedRows<Number>> ahead;
    ahead.add(rows(c.key, next.keys), c.value_dim * size, following);
    ahead.add(rows(c.value, next.values), rope_dim * size, rope_dim == 0 ? 0 : following);
    one_block<typename As::Kind, typename As::Values>(c, part, 0, keys, keys, from, count, &ahead);
  }
}

void attend(const DecodeCall* c, const DecodePart* part) {
  switch (c->dtype) {
    case FLOAT32: return attend_as<Widened<NumbersFloat32>>(*c, *part);
#if defined(__AVX512BF16__)
    case BFLOAT16: return attend_as<AsBFloat16>(*c, *part);
#else
    case BFLOAT16: return attend_as<Widened<NumbersBFloat16>>(*c, *part);
#endif
    case FLOAT16: return attend_as<Widened<NumbersFloat16>>(*c, *part);
  }
}

int64_t row_bytes(const DecodeCall* c) { return BLOCK * c->dim * static_cast<int64_t>(sizeof(float)); }

template <class Values>
void write(const float* sums, int64_t count, float factor, float* out) {
  for (int64_t d = 0; d < count; ++d) {
    out[d] = sums[d / PAIR * PAIR + Values::position(static_cast<int>(d % PAIR))] * factor;
  }
}

void combine(const DecodeCall* c, int64_t h, float* sums, int64_t parts, int64_t stride, float* out) {
  const float factor = reduce(*c, h, sums, parts, stride);
  if (parts == 0) {
    memset(out, 0, static_cast<size_t>(c->value_dim) * sizeof(float));
    return;
  }
#if defined(__AVX512BF16__)
  if (c->dtype == BFLOAT16) return write<ValuesBFloat16>(sums + LEADING, c->value_dim, factor, out);
#endif
  write<ValuesFloat32>(sums + LEADING, c->value_dim, factor, out);
}

}  // namespace

extern const LatentFunctions EASYTORCH_NAME(latents);
const LatentFunctions EASYTORCH_NAME(latents) = {packing, pack, sums_row, row_bytes, absorb, attend, combine};
