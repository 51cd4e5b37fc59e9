// The operator easytorch_cpu::multi_latent_pages: absorbed latent attention over the pages of each sequence.
#include "../ragged_page/cpu_pages.h"

#include <memory>

#include "../attention/cpu_call.h"
#include "cpu_projections.h"

EASYTORCH_TABLE(LatentFunctions, latents)

namespace easytorch {
namespace {

DecodeCache latent_pool(const Tensor& pages) {
  require(pages.sizes[2] <= 1 || pages.strides[2] == 1, "multi_latent_pages: the last dimension must be contiguous");
  return {pages.data, pages.strides[0], 0, pages.strides[1], nullptr, 0, 0, 0, 0};
}

// query (N, H, Dn), query_rope (N, H, R), latent_pages (P, size, L), rope_pages (P, size, R), ragged_page's tables,
// up_key (H, Dn, L), up_value (H, Dv, L) and the record of the call -> (N, H, Dv), zeros of rows of no sequence or of one of
// more than most_rows. What a row sees is what it sees in ragged_page.
void multi_latent_pages(uint64_t* stack, uint64_t, uint64_t) {
  const Tensor query(stack[0]), query_rope(stack[1]), latent(stack[2]), rope(stack[3]), context_lens(stack[4]),
      block_tables(stack[5]), query_start_loc(stack[6]);
  const OptionalTensor up_key(stack[7]), up_value(stack[8]);
  const AttentionCall given(stack + 9);
  const uint64_t* const after = stack + 9 + AttentionCall::FIELDS;
  const int64_t most_rows = static_cast<int64_t>(after[0]), level = static_cast<int64_t>(after[1]);
  require(query.dim == 3 && query_rope.dim == 3 && latent.dim == 3 && rope.dim == 3,
          "multi_latent_pages takes queries and pages of three dimensions");
  const int64_t tokens = query.sizes[0], heads = query.sizes[1], page_count = latent.sizes[0], page_size = latent.sizes[1];
  require(query_rope.sizes[0] == tokens && query_rope.sizes[1] == heads && query_rope.sizes[2] == rope.sizes[2] &&
              rope.sizes[0] == page_count && rope.sizes[1] == page_size && page_size > 0,
          "multi_latent_pages: queries and pages do not fit");
  const LatentInputs in(query, query_rope, latent, rope, up_key, up_value);
  require(!given.mask && !given.bias, "multi_latent_pages has no mask and no bias");
  require_tables(context_lens, block_tables, query_start_loc);
  const int64_t sizes[3] = {tokens, heads, in.value_dim};
  Tensor output(empty(3, sizes, query.dtype));
  const LatentFunctions& functions = latents_of(level);
  const DecodeFunctions over{functions.packing, functions.pack, functions.sums_row, functions.row_bytes, functions.attend,
                             nullptr};
  const DecodeCall call{in.dtype, heads, 1, in.width + in.rope_dim, in.width, latent_pool(latent), latent_pool(rope),
                        given.rules(1, heads, 1, 0), nullptr, 0, 0};
  PagePlan plan =
      plan_of(tokens, page_count, page_size, TableNumbers(context_lens), TableNumbers(block_tables),
              TableNumbers(query_start_loc), given.left, given.right, most_rows, rows_of_block(heads));
  const PagedRows rows(over, call, std::move(plan), page_size);
  std::vector<int64_t> owned;
  for (int64_t row = 0; row < tokens; ++row) {
    if (rows.owned(row)) owned.push_back(row);
  }
  if (rows.computed < tokens && output.numel() > 0) {
    memset(output.data, 0, static_cast<size_t>(output.numel() * bytes_of(in.dtype)));
  }
  if (owned.empty() || in.value_dim == 0) {
    stack[0] = output.release();
    return;
  }
  absorb_queries(functions, in, owned, [&](int64_t i, int64_t h, const float* absorbed) {
    rows.pack_as(owned[static_cast<size_t>(i)], h, absorbed, 1, FLOAT32);
  });
  const int64_t each = heads * rows.numbers / 16 / (rows.tasks() + 1);
  run_tasks(rows.tasks(), each, functions.row_bytes(&call) / 4,
            [&](int64_t task, float* scratch) { rows.attend(task, reinterpret_cast<char*>(scratch)); });
  project_outputs(functions, skinny_of(level), in, owned, rows.numbers_of_sums / heads / 16, output.data,
                  [&](int64_t i, int64_t h, float* found) {
    const PagedRows::Sums sums = rows.sums(owned[static_cast<size_t>(i)], h);
    functions.combine(&call, h, sums.first, sums.parts, sums.stride, found);
  });
  stack[0] = output.release();
}

}  // namespace

void register_multi_latent_pages(Library& library) {
  library.define(
      "multi_latent_pages(Tensor query, Tensor query_rope, Tensor latent_pages, Tensor rope_pages, Tensor context_lens, "
      "Tensor block_tables, Tensor query_start_loc, Tensor? up_key, Tensor? up_value, " ATTENTION_CALL
      ", int most_rows, int level) -> Tensor",
      "multi_latent_pages", multi_latent_pages);
}

}  // namespace easytorch
