"""Launches of the paged kernel for DeepSeek-V3: keys of 512 + 64, values of 512. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.interop.triton_call import Call
from easytorch.kernels.ragged_page.triton_calls import Pages, forward_call


def typical_calls(dtype: torch.dtype, architecture: str) -> Iterator[tuple[str, Call]]:
    """Decoding over pages of 64 and over a dense cache, with and without split keys; a prompt over pages."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def call(name: str, tokens: int, pool: torch.Tensor, columns: int, splits: int) -> tuple[str, Call]:
        lens, tables, starts = (empty(*shape, dtype=torch.int32) for shape in ((64,), (64, columns), (65,)))
        pages = Pages(pool[..., :512], pool[..., 512:], None, lens, tables, starts, None)
        output, lse = empty(tokens, 128, 512), None
        if splits > 1:
            output = empty(tokens, 128, splits, 512, dtype=torch.float32)
            lse = empty(tokens, 128, 2, splits, dtype=torch.float32)
        queries = empty(tokens, 128, 512), empty(tokens, 128, 64)
        return name, forward_call(architecture, *queries, pages, output, lse, AttentionCall(right=0))

    yield call("decode_paged_split", 64, empty(4096, 64, 1, 576), 64, 4)
    yield call("decode_dense", 64, empty(64, 4096, 1, 576), 1, 1)
    yield call("prefill_paged", 4096, empty(4096, 64, 1, 576), 64, 1)
