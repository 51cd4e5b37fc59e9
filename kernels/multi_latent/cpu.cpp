// The operator easytorch_cpu::multi_latent: absorbed latent attention of few tokens, its projections included.
#include "cpu_projections.h"

#include <memory>
#include <numeric>

#include "../attention/cpu_call.h"
#include "../cpu/buffer.h"

EASYTORCH_TABLE(LatentFunctions, latents)

namespace easytorch {
namespace {

// Queries, all heads of a token after those of the one before it, that share a reading of the keys.
constexpr int64_t QUERIES = 128;
// Keys of a task: twice as many until there are at most MOST_TASKS. Results do not depend on the number of threads.
constexpr int64_t CHUNK = 256;
constexpr int64_t MOST_TASKS = 64;

DecodeCache rows_of(const Tensor& tensor) {
  require(tensor.sizes[2] <= 1 || tensor.strides[2] == 1, "multi_latent: the last dimension must be contiguous");
  return {tensor.data, tensor.strides[0], 0, tensor.strides[1], nullptr, 0, 0, 0, 0};
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
  const int64_t batch = query.sizes[0], tokens = query.sizes[1], heads = query.sizes[2];
  const int64_t keys = latent.sizes[1], width = latent.sizes[2], rope_dim = key_rope.sizes[2], dim = width + rope_dim;
  require(query_rope.sizes[0] == batch && query_rope.sizes[1] == tokens && query_rope.sizes[2] == heads &&
              query_rope.sizes[3] == rope_dim && latent.sizes[0] == batch && key_rope.sizes[0] == batch &&
              key_rope.sizes[1] == keys,
          "multi_latent: queries and cache do not fit");
  const LatentInputs in(query, query_rope, latent, key_rope, up_key, up_value);
  const int32_t dtype = in.dtype;
  const int64_t sizes[4] = {batch, tokens, heads, in.value_dim};
  Tensor output(empty(4, sizes, query.dtype));
  if (output.numel() == 0) {
    stack[0] = output.release();
    return;
  }
  const LatentFunctions& functions = latents_of(level);
  const SkinnyFunctions& products = skinny_of(level);
  const DecodeCall call{dtype, heads, 1, dim, width, rows_of(latent), rows_of(key_rope),
                        given.rules(batch, heads, tokens, keys), nullptr, 0, 0};

  // The queries are packed by block of QUERIES.
  const SkinnyPacking packing = functions.packing(dtype);
  const int64_t padded = (dim + packing.step - 1) / packing.step * packing.step, packed_size = bytes_of(packing.dtype);
  const int64_t rows = tokens * heads, blocks = (rows + QUERIES - 1) / QUERIES;
  const auto rows_of_block = [&](int64_t block) { return block + 1 < blocks ? QUERIES : rows - block * QUERIES; };
  std::vector<int64_t> all_tokens(static_cast<size_t>(batch * tokens));
  std::iota(all_tokens.begin(), all_tokens.end(), 0);
  const Buffer queries = lines(batch * rows * padded * packed_size);
  absorb_queries(functions, in, all_tokens, [&](int64_t i, int64_t h, const float* absorbed) {
    const int64_t b = i / tokens, row = i % tokens * heads + h, block = row / QUERIES;
    char* const out = queries.get() + ((b * rows + block * QUERIES) * padded + row % QUERIES * packing.step) * packed_size;
    functions.pack(absorbed, 1, FLOAT32, dim, rows_of_block(block), packing, out);
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

  project_outputs(functions, products, in, all_tokens, batch * tokens * chunks * row / 16, output.data,
                  [&](int64_t i, int64_t h, float* found) {
    const int64_t of = i % tokens * heads + h, number = i / tokens * rows + of;
    const auto [begin, end] = range_of(of / QUERIES);
    functions.combine(&call, h, sums + number * row, end > begin ? (end - begin + chunk - 1) / chunk : 0, stride, found);
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
