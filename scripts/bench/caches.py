"""Attention over caches: pages with block tables, and DeepSeek's compressed keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.registry import Calls, Shape, Tensors, bench, nbytes
from easytorch.operations import OperationRegistry

PAGE = 16


def _ragged(tensors: Tensors, s: Shape) -> Calls:
    """S sequences: each decodes one token over T cached ones, but the first, which prefills Q of them."""
    sequences, length, prompt = s["S"], s["T"], s.get("Q", 1)
    pages = -(-length // PAGE)
    device = tensors.device
    key, value = (tensors.randn(sequences * pages, PAGE, s["KV"], s["D"]) for _ in range(2))
    tables = torch.randperm(sequences * pages, device=device).reshape(sequences, pages).to(torch.int32)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=device)
    counts = [prompt] + [1] * (sequences - 1)
    starts = torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
    query = tensors.randn(sum(counts), s["H"], s["D"])

    def gathered() -> Tensor:
        """SDPA, one sequence after another."""
        parts = []
        for rows, table in zip(query.split(counts), tables, strict=True):
            k, v = (cache[table].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (key, value))
            seen = torch.ones(len(rows), length, dtype=torch.bool, device=device).tril(length - len(rows))
            mask = None if len(rows) == 1 else seen
            out = F.scaled_dot_product_attention(rows.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    operation = OperationRegistry.create("ragged_page_attention")
    args = (query, key, value, lengths, tables, starts)
    return Calls(
        lambda: operation(*args).attention_outputs, operation.choose(*args), {"sdpa by sequence": gathered},
        moved=nbytes(query, query, key, value),
    )  # fmt: skip


_TINY = ("S2 T48 H4 KV2 D64",)
bench("ragged_page_attention", "decode", shapes=("S8 T2048 H32 KV8 D128",), tiny=_TINY)(_ragged)
bench("ragged_page_attention", "mixed", shapes=("S8 T2048 Q256 H32 KV8 D128",))(_ragged)
bench(
    "ragged_page_attention", "decode", shapes=("S64 T8192 H32 KV8 D128",), dtypes=("bfloat16",), devices=("cuda",)
)(_ragged)  # fmt: skip


@bench("multi_latent_attention", "decode", shapes=("B2 T1 S2048 H16",), tiny=("B1 T1 S64 H4",))
@bench("multi_latent_attention", "prefill", shapes=("B1 T512 S512 H16",), tiny=("B1 T16 S16 H4",))
def multi_latent(tensors: Tensors, s: Shape) -> Calls:
    """DeepSeek's widths, against SDPA over the keys and values of every head."""
    batch, rows, keys, heads = (s[name] for name in "BTSH")
    query, query_rope = tensors.randn(batch, rows, heads, 128), tensors.randn(batch, rows, heads, 64)
    latent, key_rope = tensors.randn(batch, keys, 512), tensors.randn(batch, keys, 64)
    up_key, up_value = (tensors.randn(heads, 128, 512, scale=512**-0.5) for _ in range(2))

    def expanded() -> Tensor:
        k = torch.einsum("bsl,hdl->bhsd", latent, up_key)
        k = torch.cat((k, key_rope[:, None].expand(-1, heads, -1, -1)), dim=-1)
        v = torch.einsum("bsl,hdl->bhsd", latent, up_value)
        q = torch.cat((query, query_rope), dim=-1).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=rows == keys).transpose(1, 2)

    args = (query, query_rope, latent, key_rope, up_key, up_value)
    operation = OperationRegistry.create("multi_latent_attention")
    return Calls(
        lambda: operation(*args, causal=True).attention_outputs, operation.choose(*args, causal=True),
        {"expanded, sdpa": expanded},
    )  # fmt: skip
