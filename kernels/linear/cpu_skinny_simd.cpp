// Skinny products with weights in float32, bfloat16 or float16, rows as torch keeps them.
#include "cpu_skinny.h"

#include "../cpu/pack.h"
#include "../cpu/vendor.h"

namespace {

// The least distance at which the weight of a tile is prefetched. Measured at K = 1024, one row, one thread of a Zen 4, of a plain
// read: 1.85 without, 1.24 with 8 KiB, 1.15 to 1.2 with 16 to 64; into the L2 cache, since L1 cannot hold the loads
// in flight.
constexpr int64_t AHEAD_BYTES = 1 << 14;

// Bytes of x beyond which the L1 cache holds no row of the weight beside it: four rows of 4096 bfloat16 numbers, 32 KiB,
// are read at 0.4 of a plain read's speed row by row, and at 0.75 in tiles.
constexpr int64_t STREAMED_BYTES = 1 << 14;

template <class Kind, int MR>
void streamed_rows(const SkinnyProduct& p, int64_t m, int64_t begin, int64_t end) {
  const typename Kind::Input* x = static_cast<const typename Kind::Input*>(p.x) + m * Kind::STEP;
  for (int64_t n = begin; n < end; ++n) {
    float sums[MR];
    stream<Kind, MR>(x, p.m * Kind::STEP, static_cast<const typename Kind::Weight*>(p.weight) + n * p.ldw, p.k, sums);
    const float added = p.bias == nullptr ? 0.0f : load_number(p.bias, n, p.bias_dtype);
    for (int i = 0; i < MR; ++i) store_number(p.y, (m + i) * p.n + n, p.y_dtype, sums[i] + added);
  }
}

// What is prefetched of a block of the weight while some of the rows of x are multiplied by the one before: the rows j of
// a tile that are `nth` modulo `of`, `rows` of the weight later.
struct Share {
  int64_t rows, nth, of;
};

template <class Kind, int MR>
void rows_of_x(const SkinnyProduct& p, int64_t m, int64_t begin, int64_t end, Share share) {
  constexpr int NR = columns_of(MR);
  const int64_t some = (AHEAD_BYTES / static_cast<int64_t>(sizeof(typename Kind::Weight)) / p.k / NR + 1) * NR;
  int64_t ahead[NR];
  const int64_t rows_ahead = some > share.rows ? some : share.rows;
  for (int j = 0; j < NR; ++j) ahead[j] = j % share.of == share.nth ? rows_ahead * p.ldw : 0;
  typedef typename Kind::Weight Weight;
  const typename Kind::Input* x = static_cast<const typename Kind::Input*>(p.x) + m * Kind::STEP;
  for (int64_t n = begin; n < end; n += NR) {
    const int count = end - n < NR ? static_cast<int>(end - n) : NR;
    const Weight* rows[NR];
    for (int j = 0; j < NR; ++j) {  // a last tile of fewer rows reads its last row again
      rows[j] = static_cast<const Weight*>(p.weight) + (n + (j < count ? j : count - 1)) * p.ldw;
    }
    float sums[MR * 4];
    tile<Kind, MR, NR>(x, p.m * Kind::STEP, rows, p.k, ahead, sums);
    for (int j = 0; j < count; ++j) {
      const float added = p.bias == nullptr ? 0.0f : load_number(p.bias, n + j, p.bias_dtype);
      for (int i = 0; i < MR; ++i) store_number(p.y, (m + i) * p.n + n + j, p.y_dtype, sums[4 * i + j] + added);
    }
  }
}

template <class Kind>
void some_rows(const SkinnyProduct& p, int rows, int64_t m, int64_t begin, int64_t end, Share share) {
  switch (rows) {
    case 1: return rows_of_x<Kind, 1>(p, m, begin, end, share);
    case 2: return rows_of_x<Kind, 2>(p, m, begin, end, share);
#if defined(__AVX2__)
    case 3: return rows_of_x<Kind, 3>(p, m, begin, end, share);
    case 4: return rows_of_x<Kind, 4>(p, m, begin, end, share);
#endif
#if defined(__AVX512F__)
    case 5: return rows_of_x<Kind, 5>(p, m, begin, end, share);
    case 6: return rows_of_x<Kind, 6>(p, m, begin, end, share);
    case 7: return rows_of_x<Kind, 7>(p, m, begin, end, share);
    case 8: return rows_of_x<Kind, 8>(p, m, begin, end, share);
#endif
  }
}

// Rows of x of a part where there are several, on Intel's.
constexpr int64_t MOST_OF_PARTS = 6;

// Weight rows whose second reading, for the next rows of x, comes from the cache.
constexpr int64_t BLOCK = 12;

// Whether the weight was read row by row, which is as fast as memory is, but not on Intel's: 4096x1024 float32, two threads of a
// Xeon (Emerald Rapids), 22 GB/s, and 29 by tiles of four rows, where a plain read gives 17.
template <class Kind>
bool streamed(const SkinnyProduct& p, int64_t begin, int64_t end) {
  if (is_intel()) return false;
  const int64_t bytes = p.m * p.k * static_cast<int64_t>(sizeof(typename Kind::Input));
  if (p.m > MOST_STREAMED || (p.m > 1 && bytes > STREAMED_BYTES)) return false;
  switch (p.m) {
    case 1: streamed_rows<Kind, 1>(p, 0, begin, end); return true;
#if defined(__AVX2__)
    case 2: streamed_rows<Kind, 2>(p, 0, begin, end); return true;
#endif
#if defined(__AVX512F__)
    case 3: streamed_rows<Kind, 3>(p, 0, begin, end); return true;
    case 4: streamed_rows<Kind, 4>(p, 0, begin, end); return true;
#endif
  }
  return false;
}

template <class Kind>
void product(const SkinnyProduct& p, int64_t begin, int64_t end) {
  if (streamed<Kind>(p, begin, end)) return;
  // Of several parts one of six rows and four of the weight loads less for each sum than one of eight and three; and what
  // is prefetched of a block during its first part alone is more than can be in flight. 4096x1024 in bfloat16, 16 and 32
  // rows, one thread of a Xeon (Emerald Rapids): 0.78 and 0.74 of the time.
#if defined(__AVX512F__)
  const bool shared = is_intel();
#else
  const bool shared = false;
#endif
  const int64_t most = shared && p.m > MOST_ROWS ? MOST_OF_PARTS : MOST_ROWS, parts = (p.m + most - 1) / most;
  const int64_t of = !shared ? 1 : parts < columns_of(1) ? parts : columns_of(1);
  const int64_t block = parts == 1 ? end - begin : BLOCK;
  for (int64_t n = begin; n < end; n += block) {
    const int64_t last = n + block < end ? n + block : end;
    for (int64_t part = 0; part < parts; ++part) {  // of sizes that differ by one at most
      const int64_t from = p.m * part / parts, to = p.m * (part + 1) / parts;
      some_rows<Kind>(p, static_cast<int>(to - from), from, n, last, {parts == 1 ? 0 : block, part % of, of});
    }
  }
}

void run(const SkinnyProduct* p, int64_t begin, int64_t end) {
#if defined(__AVX512BF16__)
  if (p->x_dtype == BFLOAT16) return product<OfBFloat16Pairs>(*p, begin, end);
#endif
  switch (p->weight_dtype) {
    case FLOAT32: return product<OfFloat32>(*p, begin, end);
    case BFLOAT16: return product<OfBFloat16>(*p, begin, end);
    case FLOAT16: return product<OfFloat16>(*p, begin, end);
  }
}

int64_t largest_of(const void* numbers, int64_t n, int32_t dtype, float* number) {
  int64_t best = 0;
  float most = load_number(numbers, 0, dtype);
  for (int64_t i = 1; i < n && most == most; ++i) {
    const float one = load_number(numbers, i, dtype);
    if (!(one <= most)) best = i, most = one;
  }
  *number = most;
  return best;
}

}  // namespace

extern const SkinnyFunctions EASYTORCH_NAME(skinny);
const SkinnyFunctions EASYTORCH_NAME(skinny) = {packing, pack, run, largest_of};
