#include "cpu_experts.h"

#include "../cpu/functions.h"
#include "../cpu/rows.h"

namespace {

template <class Numbers>
void clamped_row(const void* from, void* to, int64_t n, float alpha, float limit) {
  typedef typename Numbers::Number Number;
  const Number* pairs = static_cast<const Number*>(from);
  Number* y = static_cast<Number*>(to);
  float gate[WIDTH] = {}, up[WIDTH] = {};
  const auto rounded_to = [](Floats x) { return Numbers::round(x); };
  for (int64_t i = 0; i < n; i += WIDTH) {
    const int64_t count = n - i < WIDTH ? n - i : WIDTH;
    for (int64_t j = 0; j < count; ++j) {
      gate[j] = load_number(pairs, 2 * (i + j), Numbers::DTYPE);
      up[j] = load_number(pairs, 2 * (i + j) + 1, Numbers::DTYPE);
    }
    // in this order NaN stays
    const Floats most = broadcast(limit), least = broadcast(-limit);
    const Floats g = minimum(most, load(gate)), u = maximum(least, minimum(most, load(up)));
    const Floats active = rounded_to(times_sigmoid(g, rounded_to(multiply(g, broadcast(alpha)))));
    write_some<Numbers>(y + i, count, multiply(rounded_to(add(u, broadcast(1.0f))), active));
  }
}

void clamped(const void* pairs, void* y, int64_t n, int32_t dtype, float alpha, float limit) {
  switch (dtype) {
    case FLOAT32: return clamped_row<NumbersFloat32>(pairs, y, n, alpha, limit);
    case BFLOAT16: return clamped_row<NumbersBFloat16>(pairs, y, n, alpha, limit);
    case FLOAT16: return clamped_row<NumbersFloat16>(pairs, y, n, alpha, limit);
  }
}

template <class Numbers>
void weighted_rows(const void* data, int64_t stride, const int64_t* rows, const float* weights, int64_t k, void* to,
                   int64_t n) {
  typedef typename Numbers::Number Number;
  for (int64_t i = 0; i < n; i += WIDTH) {
    Floats sum = zeros();
    for (int64_t j = 0; j < k; ++j) {
      if (rows[j] < 0) continue;
      const Number* row = static_cast<const Number*>(data) + rows[j] * stride;
      sum = multiply_add(broadcast(weights[j]), read_some<Numbers>(row + i, n - i), sum);
    }
    write_some<Numbers>(static_cast<Number*>(to) + i, n - i, sum);
  }
}

void weighted(const void* data, int64_t stride, const int64_t* rows, const float* weights, int64_t k, void* y, int64_t n,
              int32_t dtype) {
  switch (dtype) {
    case FLOAT32: return weighted_rows<NumbersFloat32>(data, stride, rows, weights, k, y, n);
    case BFLOAT16: return weighted_rows<NumbersBFloat16>(data, stride, rows, weights, k, y, n);
    case FLOAT16: return weighted_rows<NumbersFloat16>(data, stride, rows, weights, k, y, n);
  }
}

void widen(const void* row, int64_t k, int32_t dtype, float* to) {
  for (int64_t i = 0; i < k; i += WIDTH) {
    write_some<NumbersFloat32>(to + i, k - i, read_vector(number_at(row, i, dtype), k - i, dtype));
  }
}

// Rows of x whose sums are kept at a time, and rows of the weight that are added to them at once.
constexpr int64_t ROWS = 16, DEPTH = 4;

// The sums (rows, COLUMNS_OF_TASK) of `rows` rows of x and DEEP rows of the weight from row k on.
template <class Numbers, int DEEP>
inline void add_rows(const ColumnsProduct& p, const float* x, int64_t rows, int64_t k, int64_t begin, int64_t count,
                     float* sums) {
  typedef typename Numbers::Number Number;
  const Number* const from = static_cast<const Number*>(p.weight) + k * p.weight_row + begin;
  const bool more = k + 2 * DEEP <= p.k;
  for (int64_t j = 0; j < count; j += WIDTH) {
    Floats weight[DEEP];
#pragma GCC unroll 4
    for (int r = 0; r < DEEP; ++r) {
      weight[r] = read_some<Numbers>(from + r * p.weight_row + j, count - j);
      if (more) __builtin_prefetch(from + (DEEP + r) * p.weight_row + j);
    }
    for (int64_t i = 0; i < rows; ++i) {
      float* const to = sums + i * COLUMNS_OF_TASK + j;
      Floats total = load(to);
#pragma GCC unroll 4
      for (int r = 0; r < DEEP; ++r) total = multiply_add(broadcast(x[i * p.k + k + r]), weight[r], total);
      store(to, total);
    }
  }
}

template <class Numbers>
void columns_as(const ColumnsProduct& p, int64_t begin, int64_t end) {
  typedef typename Numbers::Number Number;
  float sums[ROWS * COLUMNS_OF_TASK];
  const int64_t count = end - begin;
  for (int64_t row = 0; row < p.m; row += ROWS) {
    const int64_t rows = p.m - row < ROWS ? p.m - row : ROWS;
    const float* const x = p.x + row * p.k;
    memset(sums, 0, static_cast<size_t>(rows * COLUMNS_OF_TASK) * sizeof *sums);
    int64_t k = 0;
    for (; k + DEPTH <= p.k; k += DEPTH) add_rows<Numbers, DEPTH>(p, x, rows, k, begin, count, sums);
    for (; k < p.k; ++k) add_rows<Numbers, 1>(p, x, rows, k, begin, count, sums);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < count; j += WIDTH) {
        Floats total = load(sums + i * COLUMNS_OF_TASK + j);
        if (p.bias != nullptr) total = add(total, read_some<Numbers>(static_cast<const Number*>(p.bias) + begin + j, count - j));
        write_some<Numbers>(static_cast<Number*>(p.y) + (row + i) * p.n + begin + j, count - j, total);
      }
    }
  }
}

void columns(const ColumnsProduct* product, int64_t begin, int64_t end) {
  switch (product->dtype) {
    case FLOAT32: return columns_as<NumbersFloat32>(*product, begin, end);
    case BFLOAT16: return columns_as<NumbersBFloat16>(*product, begin, end);
    case FLOAT16: return columns_as<NumbersFloat16>(*product, begin, end);
  }
}

}  // namespace

extern const ExpertsFunctions EASYTORCH_NAME(experts);
const ExpertsFunctions EASYTORCH_NAME(experts) = {widen, columns, clamped, weighted};
