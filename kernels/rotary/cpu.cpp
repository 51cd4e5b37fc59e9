// The operator easytorch_cpu::rotary.
#include "cpu_turn.h"

#include "../cpu/levels.h"
#include "../cpu/torch_abi.h"

EASYTORCH_TABLE(TurnFunctions, turn)

namespace easytorch {
namespace {

// Numbers below which another thread would cost more than it saves.
constexpr int64_t GRAIN = 1 << 15;

bool last_dim_contiguous(const Tensor& tensor) {
  return tensor.sizes[tensor.dim - 1] <= 1 || tensor.strides[tensor.dim - 1] == 1;
}

// query (B, T, H, D), key (B, T, K, D), cos and sin (B or 1, T, R), all with a contiguous last dimension.
void rotary(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor query(stack[0]), key(stack[1]), cos(stack[2]), sin(stack[3]);
  const int64_t level = static_cast<int64_t>(stack[4]);
  require(query.dim == 4 && key.dim == 4 && cos.dim == 3 && sin.dim == 3,
          "rotary takes query (B, T, H, D), key (B, T, K, D), cos and sin (B or 1, T, R)");
  const int64_t batch = query.sizes[0], tokens = query.sizes[1], dim = query.sizes[3], turned = cos.sizes[2];
  require(key.sizes[0] == batch && key.sizes[1] == tokens && key.sizes[3] == dim, "rotary: query and key do not fit");
  require((cos.sizes[0] == 1 || cos.sizes[0] == batch) && cos.sizes[1] == tokens && turned <= dim && turned % 2 == 0,
          "rotary: the tables do not fit the heads");
  require(sin.sizes[0] == cos.sizes[0] && sin.sizes[1] == tokens && sin.sizes[2] == turned,
          "rotary: cos and sin do not fit");
  require(last_dim_contiguous(query) && last_dim_contiguous(key) && last_dim_contiguous(cos) && last_dim_contiguous(sin),
          "rotary: the last dimension must be contiguous");
  const int32_t dtype = element_of(query.dtype);
  require(dtype >= 0 && key.dtype == query.dtype && cos.dtype == query.dtype && sin.dtype == query.dtype,
          "rotary takes one dtype: float32, bfloat16 or float16");
  const TurnFunctions& functions = turn_of(level);
  const int64_t size = dtype == FLOAT32 ? 4 : 2;
  Tensor turned_query(empty_like_rows(query, dim)), turned_key(empty_like_rows(key, dim));
  const auto turn = [&](const Tensor& x, const Tensor& y, int64_t b, int64_t t) {
    const int64_t heads = x.sizes[2], row = cos.sizes[0] == 1 ? 0 : b;
    const char* from = static_cast<const char*>(x.data) + (b * x.strides[0] + t * x.strides[1]) * size;
    char* to = static_cast<char*>(y.data) + (b * tokens + t) * heads * dim * size;
    const char* c = static_cast<const char*>(cos.data) + (row * cos.strides[0] + t * cos.strides[1]) * size;
    const char* s = static_cast<const char*>(sin.data) + (row * sin.strides[0] + t * sin.strides[1]) * size;
    for (int64_t h = 0; h < heads; ++h) {
      functions.halves(from + h * x.strides[2] * size, c, s, to + h * dim * size, turned, dim, dtype);
    }
  };
  const int64_t each = (query.sizes[2] + key.sizes[2]) * dim;
  parallel_for(batch * tokens, 1 + GRAIN / (each + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      turn(query, turned_query, i / tokens, i % tokens);
      turn(key, turned_key, i / tokens, i % tokens);
    }
  });
  stack[0] = turned_query.release();
  stack[1] = turned_key.release();
}

}  // namespace

void register_rotary(Library& library) {
  library.define("rotary(Tensor query, Tensor key, Tensor cos, Tensor sin, int level) -> (Tensor, Tensor)", "rotary",
                 rotary);
}

}  // namespace easytorch
