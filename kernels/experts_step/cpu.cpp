// The operator easytorch_cpu::experts_step: the experts that a router chose for a few tokens, in one parallel region. The
// weights of each chosen expert are read once, whatever the number of its tokens.
#include "cpu_experts.h"
#include "cpu_stack.h"

#include <vector>

#include "../glu/cpu_gate.h"

EASYTORCH_TABLE(ExpertsFunctions, experts)
EASYTORCH_TABLE(GateFunctions, gate)

namespace easytorch {
namespace {

// The activation after those of a gated unit: pairs of gate and up, clamped (gpt-oss).
constexpr int64_t CLAMPED = GELU_TANH + 1;
// Columns of the sum that are one task.
constexpr int64_t COLUMNS = 512;

// The product of one expert's rows with its part of a stack.
class ExpertProduct {
 public:
  // m rows of K numbers: `row(i)` begins row i.
  ExpertProduct(const Stack& stack, int64_t expert, int64_t m, int32_t dtype, int64_t level)
      : functions_(skinny_of(level)), experts_(experts_of(level)), packing_(functions_.packing(dtype)), m_(m),
        k_(stack.columns()), dtype_(dtype), by_columns_(stack.by_columns()) {
    if (!stack.dense()) {
      codes_ = std::make_unique<Codes>(stack.codes(expert));
      rows_ = std::make_unique<QuantizedRows>(*codes_, m, dtype, level);
      packed_ = lines(rows_->bytes());
      quantized_ = codes_->product(packed_.get(), m, dtype, stack.bias_of(expert), dtype, nullptr);
      return;
    }
    if (by_columns_) {
      packed_ = lines(m * k_ * 4);
      columns_ = {reinterpret_cast<const float*>(packed_.get()), m, k_, stack.rows(), stack.of(expert),
                  stack.weight.strides[2], stack.bias_of(expert), nullptr, dtype};
      return;
    }
    packed_ = lines(m * ((k_ + packing_.step - 1) / packing_.step) * packing_.step * size_of(packing_.dtype));
    dense_ = {packed_.get(), packing_.dtype, m, stack.rows(), k_, stack.of(expert), stack.weight.strides[1], dtype,
              stack.bias_of(expert), dtype, nullptr, dtype};
  }

  template <class Row>
  void pack(const Row& row) {
    if (rows_) {
      way_ = rows_->pack(row, 1, packed_.get());
      return;
    }
    for (int64_t i = 0; i < m_; ++i) {
      if (by_columns_) {
        experts_.widen(row(i), k_, dtype_, reinterpret_cast<float*>(packed_.get()) + i * k_);
        continue;
      }
      functions_.pack(row(i), 1, dtype_, k_, m_, packing_, packed_.get() + i * packing_.step * size_of(packing_.dtype));
    }
  }
  void to(void* y) { dense_.y = quantized_.y = columns_.y = y; }
  // Its columns [begin, end).
  void run(int64_t begin, int64_t end) const {
    if (by_columns_) return experts_.columns(&columns_, begin, end);
    rows_ ? rows_->run(way_, quantized_, begin, end) : functions_.run(&dense_, begin, end);
  }

 private:
  const SkinnyFunctions& functions_;
  const ExpertsFunctions& experts_;
  const SkinnyPacking packing_;
  const int64_t m_, k_;
  const int32_t dtype_;
  const bool by_columns_;
  Buffer packed_;
  std::unique_ptr<Codes> codes_;
  std::unique_ptr<QuantizedRows> rows_;
  QuantizedRows::Way way_ = QuantizedRows::IN_FLOAT32;
  SkinnyProduct dense_{};
  QuantizedProduct quantized_{};
  ColumnsProduct columns_{};
};

// An expert that some tokens chose: its picks, numbers of the router's choices, and where its rows begin.
struct Chosen {
  std::vector<int64_t> picks;
  int64_t first;
  std::unique_ptr<ExpertProduct> opening, closing;
};

// x (N, D), indices (N, k) int64 and weights (N, k) float32 of the router, gate_up (E, 2 * I, D), down (E, D, I) -> (N, D):
// the sums of weight * down(unit(gate_up(x))). The gate's rows come before those of up, but for CLAMPED, where they are the
// even ones. An index of E or more adds nothing.
void experts_step(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), indices(stack[1]), weights(stack[2]);
  const Stack gate_up(stack + 3), down(stack + 3 + Projection::FIELDS);
  const uint64_t* const after = stack + 3 + 2 * Projection::FIELDS;
  const int64_t activation = static_cast<int64_t>(after[0]);
  const float alpha = static_cast<float>(number_of(after[1])), limit = static_cast<float>(number_of(after[2]));
  const int64_t threads = static_cast<int64_t>(after[3]), level = static_cast<int64_t>(after[4]);
  const int32_t dtype = element_of(x.dtype);
  require(dtype >= 0, "experts_step takes float32, bfloat16 or float16");
  require(x.dim == 2 && x.contiguous() && indices.dim == 2 && indices.contiguous() && weights.dim == 2 &&
              weights.contiguous() && indices.dtype == aoti_torch_dtype_int64() &&
              weights.dtype == aoti_torch_dtype_float32(),
          "experts_step takes x (N, D), indices (N, k) in int64 and weights (N, k) in float32, dense");
  const int64_t tokens = x.sizes[0], width = x.sizes[1], k = indices.sizes[1], experts = gate_up.experts();
  require(indices.sizes[0] == tokens && weights.sizes[0] == tokens && weights.sizes[1] == k,
          "experts_step: x and the router's choice do not fit");
  const int64_t both = gate_up.rows(), inner = both / 2, size = size_of(dtype);
  require(both % 2 == 0 && gate_up.fits(experts, both, width, x.dtype) && down.fits(experts, width, inner, x.dtype),
          "experts_step: the stacks do not fit");
  require(activation >= SILU && activation <= CLAMPED && threads > 0, "experts_step: no such activation or threads");
  Tensor y(empty(2, x.sizes, x.dtype));

  // the picks of each expert that is chosen, in the order of the experts
  const int64_t* const index = static_cast<const int64_t*>(indices.data);
  std::vector<int64_t> place(static_cast<size_t>(experts), -1), row_of(static_cast<size_t>(tokens * k), -1);
  std::vector<Chosen> chosen;
  for (int64_t pick = 0; pick < tokens * k; ++pick) {
    const int64_t expert = index[pick];
    require(expert >= 0, "experts_step: an index is negative");
    if (expert < experts) place[static_cast<size_t>(expert)] = 0;
  }
  for (int64_t expert = 0; expert < experts; ++expert) {
    if (place[static_cast<size_t>(expert)] < 0) continue;
    place[static_cast<size_t>(expert)] = static_cast<int64_t>(chosen.size());
    chosen.emplace_back();
  }
  for (int64_t pick = 0; pick < tokens * k; ++pick) {
    if (index[pick] < experts) chosen[static_cast<size_t>(place[static_cast<size_t>(index[pick])])].picks.push_back(pick);
  }
  int64_t rows = 0;
  for (Chosen& one : chosen) {
    const int64_t expert = index[one.picks[0]], m = static_cast<int64_t>(one.picks.size());
    one.first = rows;
    for (int64_t i = 0; i < m; ++i) row_of[static_cast<size_t>(one.picks[static_cast<size_t>(i)])] = rows + i;
    one.opening = std::make_unique<ExpertProduct>(gate_up, expert, m, dtype, level);
    one.closing = std::make_unique<ExpertProduct>(down, expert, m, dtype, level);
    rows += m;
  }

  const int64_t count = static_cast<int64_t>(chosen.size());
  const Buffer pairs = lines(rows * both * size), units = lines(rows * inner * size), done = lines(rows * width * size);
  const int64_t opening_block = (gate_up.block() + 1) / 2, closing_block = down.block();
  const int64_t opening_tasks = (inner + opening_block - 1) / opening_block;
  const int64_t closing_tasks = (width + closing_block - 1) / closing_block, columns = (width + COLUMNS - 1) / COLUMNS;
  const ExpertsFunctions& functions = experts_of(level);
  const GateFunctions& unit = gate_of(level);
  Phase taking(count, threads), opening(count * opening_tasks, threads), between(count, threads),
      closing(count * closing_tasks, threads), adding(tokens * columns, threads);
  const auto at = [&](int64_t place) -> Chosen& { return chosen[static_cast<size_t>(place)]; };
  parallel_for(threads, 1, [&](int64_t thread, int64_t) {
    taking.run(thread, [&](int64_t task) {
      Chosen& one = at(task);
      one.opening->to(pairs.get() + one.first * both * size);
      one.closing->to(done.get() + one.first * width * size);
      one.opening->pack([&](int64_t i) {
        return static_cast<const char*>(x.data) + one.picks[static_cast<size_t>(i)] / k * width * size;
      });
    });
    opening.run(thread, [&](int64_t task) {
      const Chosen& one = at(task / opening_tasks);
      const int64_t begin = task % opening_tasks * opening_block, m = static_cast<int64_t>(one.picks.size());
      const int64_t end = begin + opening_block < inner ? begin + opening_block : inner;
      if (activation == CLAMPED) {
        one.opening->run(2 * begin, 2 * end);
      } else {
        one.opening->run(begin, end);
        one.opening->run(inner + begin, inner + end);
      }
      for (int64_t row = one.first; row < one.first + m; ++row) {
        const char* const pair = pairs.get() + row * both * size;
        char* const out = units.get() + (row * inner + begin) * size;
        if (activation == CLAMPED) {
          functions.clamped(pair + 2 * begin * size, out, end - begin, dtype, alpha, limit);
        } else {
          unit.run(pair + begin * size, pair + (inner + begin) * size, out, end - begin, dtype, activation);
        }
      }
    });
    between.run(thread, [&](int64_t task) {
      const Chosen& one = at(task);
      one.closing->pack([&](int64_t i) { return units.get() + (one.first + i) * inner * size; });
    });
    closing.run(thread, [&](int64_t task) {
      const int64_t begin = task % closing_tasks * closing_block;
      at(task / closing_tasks).closing->run(begin, begin + closing_block < width ? begin + closing_block : width);
    });
    adding.run(thread, [&](int64_t task) {
      const int64_t token = task / columns, begin = task % columns * COLUMNS;
      functions.weighted(done.get() + begin * size, width, row_of.data() + token * k,
                         static_cast<const float*>(weights.data) + token * k, k,
                         static_cast<char*>(y.data) + (token * width + begin) * size,
                         width - begin < COLUMNS ? width - begin : COLUMNS, dtype);
    });
  });
  stack[0] = y.release();
}

}  // namespace

void register_experts_step(Library& library) {
  library.define("experts_step(Tensor x, Tensor indices, Tensor weights, " PROJECTION("gate_up") ", " PROJECTION("down")
                 ", int activation, float alpha, float limit, int threads, int level) -> Tensor",
                 "experts_step", experts_step);
}

}  // namespace easytorch
