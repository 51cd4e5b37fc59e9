// What is computed head by head before and after latent attention: queries absorbed, outputs projected.
#pragma once

#include <vector>

#include "../cpu/tasks.h"
#include "../cpu/torch_abi.h"
#include "../linear/cpu_skinny_table.h"
#include "cpu_latents.h"

namespace easytorch {

inline int64_t bytes_of(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

// The rows (B, T, H, N), or (T, H, N), of a tensor.
struct HeadRows {
  explicit HeadRows(const Tensor& x)
      : data(x.data), tokens(x.sizes[x.dim - 3]), of_batch(x.dim == 4 ? x.strides[0] : 0), of_token(x.strides[x.dim - 3]),
        of_head(x.strides[x.dim - 2]), of_number(x.strides[x.dim - 1]) {}
  // Head h of token i of all batches, widened.
  void read(int64_t i, int64_t h, int64_t count, int32_t dtype, float* out) const {
    const int64_t at = i / tokens * of_batch + i % tokens * of_token + h * of_head;
    for (int64_t d = 0; d < count; ++d) out[d] = load_number(data, at + d * of_number, dtype);
  }
  const void* data;
  int64_t tokens, of_batch, of_token, of_head, of_number;
};

// query (.., H, Dn), query_rope (.., H, R), up_key (H, Dn, L) and up_value (H, Dv, L), or null: Dn is L, or Dv is L; what
// does not fit is refused. The caller has looked at the dimensions of queries and cache.
struct LatentInputs {
  LatentInputs(const Tensor& query, const Tensor& query_rope, const Tensor& latent, const Tensor& key_rope,
               const OptionalTensor& up_key, const OptionalTensor& up_value)
      : query(query), query_rope(query_rope), up_key(up_key ? &*up_key : nullptr), up_value(up_value ? &*up_value : nullptr),
        heads(query.sizes[query.dim - 2]), query_dim(query.sizes[query.dim - 1]), width(latent.sizes[latent.dim - 1]),
        rope_dim(key_rope.sizes[key_rope.dim - 1]), dtype(element_of(query.dtype)) {
    require(heads > 0 && width > 0, "multi_latent takes some heads, and latents of some numbers");
    require(dtype >= 0, "multi_latent takes float32, bfloat16 or float16");
    require(query_rope.dtype == query.dtype && latent.dtype == query.dtype && key_rope.dtype == query.dtype,
            "multi_latent takes one dtype");
    const auto fits = [&](const Tensor& up) {
      return up.dim == 3 && up.dtype == query.dtype && up.sizes[0] == heads && up.sizes[2] == width &&
             (width == 1 || up.strides[2] == 1);
    };
    require(up_key ? fits(*up_key) && up_key->sizes[1] == query_dim : query_dim == width,
            "multi_latent: up_key is (H, Dn, L), its last dimension contiguous");
    require(!up_value || fits(*up_value), "multi_latent: up_value is (H, Dv, L), its last dimension contiguous");
    value_dim = up_value ? up_value->sizes[1] : width;
  }
  const char* matrix(const Tensor& up, int64_t h) const {
    return static_cast<const char*>(up.data) + h * up.strides[0] * bytes_of(dtype);
  }

  const Tensor &query, &query_rope;
  const Tensor *up_key, *up_value;
  int64_t heads, query_dim, width, rope_dim, value_dim = 0;
  int32_t dtype;
};

// pack(i, h, row) for every head and every i: head h of tokens[i], absorbed, L + R numbers of float32. A task is a head.
template <class Pack>
void absorb_queries(const LatentFunctions& functions, const LatentInputs& in, const std::vector<int64_t>& tokens,
                    const Pack& pack) {
  const HeadRows queries(in.query), ropes(in.query_rope);
  const int64_t count = static_cast<int64_t>(tokens.size()), dim = in.width + in.rope_dim;
  run_tasks(in.heads, count * in.query_dim * in.width / 16, count * (in.query_dim + dim), [&](int64_t h, float* scratch) {
    float* const absorbed = scratch + count * in.query_dim;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = tokens[static_cast<size_t>(i)];
      float* const x = in.up_key != nullptr ? scratch + i * in.query_dim : absorbed + i * dim;
      queries.read(token, h, in.query_dim, in.dtype, x);
      ropes.read(token, h, in.rope_dim, in.dtype, absorbed + i * dim + in.width);
    }
    if (in.up_key != nullptr) {
      const LatentProduct product{scratch, in.query_dim, count, in.query_dim, in.width, in.matrix(*in.up_key, h),
                                  in.up_key->strides[1], in.dtype, absorbed, dim};
      functions.absorb(&product);
    }
    for (int64_t i = 0; i < count; ++i) pack(i, h, absorbed + i * dim);
  });
}

// output (.., H, Dv), contiguous: that of head h of tokens[i] is what combine(i, h, found) makes, L numbers of float32,
// projected. each: the cost of `combine` for a head. A task is a head.
template <class Combine>
void project_outputs(const LatentFunctions& functions, const SkinnyFunctions& products, const LatentInputs& in,
                     const std::vector<int64_t>& tokens, int64_t each, void* output, const Combine& combine) {
  const SkinnyPacking packing = functions.packing(in.dtype);
  const int64_t count = static_cast<int64_t>(tokens.size()), size = bytes_of(in.dtype), packed_size = bytes_of(packing.dtype);
  const int64_t filled = (in.width + packing.step - 1) / packing.step * packing.step;
  const int64_t packed = count * filled * packed_size / 4 + 16, result = count * in.value_dim;
  const auto place = [&](int64_t i, int64_t h) {
    return static_cast<char*>(output) + (tokens[static_cast<size_t>(i)] * in.heads + h) * in.value_dim * size;
  };
  run_tasks(in.heads, count * in.value_dim * in.width / 16 + each, in.width + packed + result,
            [&](int64_t h, float* scratch) {
    float* const found = scratch;
    char* const x = reinterpret_cast<char*>(scratch + in.width);
    char* const y = reinterpret_cast<char*>(scratch + in.width + packed);
    for (int64_t i = 0; i < count; ++i) {
      combine(i, h, found);
      if (in.up_value != nullptr) {
        functions.pack(found, 1, FLOAT32, in.width, count, packing, x + i * packing.step * packed_size);
      } else {
        functions.pack(found, 1, FLOAT32, in.width, 1, {in.dtype, 1}, place(i, h));
      }
    }
    if (in.up_value == nullptr) return;
    const SkinnyProduct product{x, packing.dtype, count, in.value_dim, in.width, in.matrix(*in.up_value, h),
                                in.up_value->strides[1], in.dtype, nullptr, in.dtype, y, in.dtype};
    products.run(&product, 0, in.value_dim);
    for (int64_t i = 0; i < count; ++i) {
      memcpy(place(i, h), y + i * in.value_dim * size, static_cast<size_t>(in.value_dim * size));
    }
  });
}

}  // namespace easytorch
