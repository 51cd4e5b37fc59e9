// The operator easytorch_cpu::multi_latent: absorbed latent attention of few tokens, its projections included.
#include "cpu_latents.h"

#include <atomic>
#include <memory>
#include <new>

#include "../attention/cpu_call.h"
#include "../cpu/buffer.h"
#include "../cpu/tasks.h"
#include "../linear/cpu_skinny_table.h"

EASYTORCH_TABLE(LatentFunctions, latents)

namespace easytorch {
namespace {

// Queries, all heads of a token after those of the one before it, that share a reading of the keys.
constexpr int64_t QUERIES = 128;
// Keys of a task: twice as many until there are at most MOST_TASKS. Results do not depend on the number of threads.
constexpr int64_t CHUNK = 256;
constexpr int64_t MOST_TASKS = 64;

inline int64_t bytes_of(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

DecodeCache rows_of(const Tensor& tensor) {
  require(tensor.sizes[2] <= 1 || tensor.strides[2] == 1, "multi_latent: the last dimension must be contiguous");
  return {tensor.data, tensor.strides[0], 0, tensor.strides[1], nullptr, 0, 0, 0, 0};
}

const char* matrix_of(const Tensor& up, int64_t h, int64_t size) {
  return static_cast<const char*>(up.data) + h * up.strides[0] * size;
}

// query (B, T, H, Dn), query_rope (B, T, H, R), latent (B, S, L), key_rope (B, S, R), up_key (H, Dn, L), up_value
// (H, Dv, L) and the record of the call -> (B, T, H, Dv). Without up_key Dn is L, without up_value Dv is L.
void multi_latent(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor query(stack[0]), query_rope(stack[1]), latent(stack[2]), key_rope(stack[3]);
  const OptionalTensor up_key(stack[4]), up_value(stack[5]);
  const AttentionCall given(stack + 6);
  const int64_t level = static_cast<int64_t>(stack[6 + AttentionCall::FIELDS]);
  require(query.dim == 4 && query_rope.dim == 4 && latent.dim == 3 && key_rope.dim == 3,
          "multi_latent takes queries of four dimensions and a cache of three");
  const int64_t batch = query.sizes[0], tokens = query.sizes[1], heads = query.sizes[2], query_dim = query.sizes[3];
  const int64_t keys = latent.sizes[1], width = latent.sizes[2], rope_dim = key_rope.sizes[2], dim = width + rope_dim;
  require(query_rope.sizes[0] == batch && query_rope.sizes[1] == tokens && query_rope.sizes[2] == heads &&
              query_rope.sizes[3] == rope_dim && latent.sizes[0] == batch && key_rope.sizes[0] == batch &&
              key_rope.sizes[1] == keys,
          "multi_latent: queries and cache do not fit");
  require(heads > 0 && width > 0, "multi_latent takes some heads, and latents of some numbers");
  const int32_t dtype = element_of(query.dtype);
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
  const int64_t value_dim = up_value ? up_value->sizes[1] : width, size = bytes_of(dtype);
  const int64_t sizes[4] = {batch, tokens, heads, value_dim};
  Tensor output(empty(4, sizes, query.dtype));
  if (output.numel() == 0) {
    stack[0] = output.release();
    return;
  }
  const LatentFunctions& functions = latents_of(level);
  const SkinnyFunctions& products = skinny_of(level);
  const DecodeCall call{dtype, heads, 1, dim, width, rows_of(latent), rows_of(key_rope),
                        given.rules(batch, heads, tokens, keys), nullptr, 0, 0};

  // The queries, absorbed: packed by block of QUERIES. A task is a head.
  const SkinnyPacking packing = functions.packing(dtype);
  const int64_t padded = (dim + packing.step - 1) / packing.step * packing.step, packed_size = bytes_of(packing.dtype);
  const int64_t rows = tokens * heads, blocks = (rows + QUERIES - 1) / QUERIES, lines_of_x = batch * tokens;
  const auto rows_of_block = [&](int64_t block) { return block + 1 < blocks ? QUERIES : rows - block * QUERIES; };
  const Buffer queries = lines(batch * rows * padded * packed_size);
  const int64_t longest = query_dim + dim;  // a row of a query, and that absorbed
  run_tasks(heads, lines_of_x * query_dim * width / 16, lines_of_x * longest, [&](int64_t h, float* scratch) {
    float* const absorbed = scratch + lines_of_x * query_dim;
    for (int64_t i = 0; i < lines_of_x; ++i) {
      const int64_t b = i / tokens, t = i % tokens;
      const int64_t at = b * query.strides[0] + t * query.strides[1] + h * query.strides[2];
      const int64_t rope = b * query_rope.strides[0] + t * query_rope.strides[1] + h * query_rope.strides[2];
      float* const x = up_key ? scratch + i * query_dim : absorbed + i * dim;
      for (int64_t d = 0; d < query_dim; ++d) x[d] = load_number(query.data, at + d * query.strides[3], dtype);
      for (int64_t d = 0; d < rope_dim; ++d) {
        absorbed[i * dim + width + d] = load_number(query_rope.data, rope + d * query_rope.strides[3], dtype);
      }
    }
    if (up_key) {
      const LatentProduct product{scratch, query_dim, lines_of_x, query_dim, width, matrix_of(*up_key, h, size),
                                  up_key->strides[1], dtype, absorbed, dim};
      functions.absorb(&product);
    }
    for (int64_t i = 0; i < lines_of_x; ++i) {
      const int64_t b = i / tokens, row = i % tokens * heads + h, block = row / QUERIES;
      char* const out = queries.get() + ((b * rows + block * QUERIES) * padded + row % QUERIES * packing.step) * packed_size;
      functions.pack(absorbed + i * dim, 1, FLOAT32, dim, rows_of_block(block), packing, out);
    }
  });

  // What each token sees, as keys [seen[2 * t], seen[2 * t + 1]), and so each query, unless all see all keys.
  const bool all = keys == 0 || (given.left >= keys + tokens && given.right >= keys + tokens) ||
                   (tokens == 1 && given.left >= keys && given.right >= 0);
  const std::unique_ptr<int64_t[]> seen(new int64_t[static_cast<size_t>(2 * rows)]);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t own = row / heads + keys - tokens, from = own > given.left ? own - given.left : 0;
    const int64_t to = own + given.right + 1 < keys ? own + given.right + 1 : keys;
    seen[2 * row] = from < keys ? from : keys;
    seen[2 * row + 1] = to < seen[2 * row] ? seen[2 * row] : to;
  }

  // A task is a range of keys for a block of queries of a sequence.
  int64_t chunk = CHUNK;
  while (batch * blocks * ((keys + chunk - 1) / chunk) > MOST_TASKS && chunk < keys) chunk *= 2;
  const int64_t chunks = (keys + chunk - 1) / chunk, row = functions.sums_row(width), stride = batch * rows * row;
  const Buffer of_sums = lines(chunks * stride * static_cast<int64_t>(sizeof(float)));
  float* const sums = reinterpret_cast<float*>(of_sums.get());
  const auto range_of = [&](int64_t block) {  // of the keys that a block's queries see
    const int64_t first = block * QUERIES, last = first + rows_of_block(block) - 1;
    return std::pair<int64_t, int64_t>(seen[2 * first], seen[2 * last + 1]);
  };
  const int64_t each = (rows < QUERIES ? rows : QUERIES) * (keys < chunk ? keys : chunk) * (dim + width) / 16;
  run_tasks(batch * blocks * chunks, each, functions.row_bytes(&call) / 4, [&](int64_t task, float* scratch) {
    const int64_t block = task % blocks, nth = task / blocks % chunks, b = task / blocks / chunks;
    const auto [begin, end] = range_of(block);
    const int64_t from = begin + nth * chunk, query = block * QUERIES;
    if (from >= end) return;
    const DecodePart part{b, from, from + chunk < end ? from + chunk : end, 0, 1, rows_of_block(block),
                          queries.get() + (b * rows + query) * padded * packed_size,
                          sums + nth * stride + (b * rows + query) * row, nullptr,
                          all ? nullptr : seen.get() + 2 * query, reinterpret_cast<char*>(scratch), query};
    functions.attend(&call, &part);
  });

  // The output of each head, projected. A task is a head.
  const int64_t filled = (width + packing.step - 1) / packing.step * packing.step;
  const int64_t packed = lines_of_x * filled * packed_size / 4 + 16, result = lines_of_x * value_dim;
  run_tasks(heads, lines_of_x * (value_dim * width / 16 + chunks * row / 16), width + packed + result,
            [&](int64_t h, float* scratch) {
    float* const found = scratch;
    char* const x = reinterpret_cast<char*>(scratch + width);
    char* const y = reinterpret_cast<char*>(scratch + width + packed);
    char* const out = static_cast<char*>(output.data);
    for (int64_t i = 0; i < lines_of_x; ++i) {
      const int64_t of = i % tokens * heads + h, number = i / tokens * rows + of;
      const auto [begin, end] = range_of(of / QUERIES);
      functions.combine(&call, h, sums + number * row, end > begin ? (end - begin + chunk - 1) / chunk : 0, stride, found);
      if (up_value) {
        functions.pack(found, 1, FLOAT32, width, lines_of_x, packing, x + i * packing.step * packed_size);
      } else {
        functions.pack(found, 1, FLOAT32, width, 1, {dtype, 1}, out + (i * heads + h) * value_dim * size);
      }
    }
    if (!up_value) return;
    const SkinnyProduct product{x, packing.dtype, lines_of_x, value_dim, width, matrix_of(*up_value, h, size),
                                up_value->strides[1], dtype, nullptr, dtype, y, dtype};
    products.run(&product, 0, value_dim);
    for (int64_t i = 0; i < lines_of_x; ++i) {
      memcpy(out + (i * heads + h) * value_dim * size, y + i * value_dim * size, static_cast<size_t>(value_dim * size));
    }
  });
  stack[0] = output.release();
}

}  // namespace

void register_multi_latent(Library& library) {
  library.define(
      "multi_latent(Tensor query, Tensor query_rope, Tensor latent, Tensor key_rope, Tensor? up_key, Tensor? up_value, "
      ATTENTION_CALL ", int level) -> Tensor",
      "multi_latent", multi_latent);
}

}  // namespace easytorch
