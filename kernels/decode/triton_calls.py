"""The launches of decoding attention: kernels, arguments and grids. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.triton_flash_calls import LOG2E, natural_scores
from easytorch.kernels.decode.triton_kernels import decode_merge, decode_split
from easytorch.kernels.decode.triton_tuning import rows_of_group, tiles_of
from easytorch.kernels.interop.triton_call import Call, adjacent, power_of_two


def split_call(
    architecture: str, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None, splits: int,
    lengths: Tensor | None, call: AttentionCall,
) -> Call:  # fmt: skip
    """Fills output (B, H, splits, Dv), contiguous, and lse (B, H, 2, splits) float32 unless there is one split."""
    batch, _, heads, dim = query.shape
    keys, kv_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    group = heads // kv_heads
    tiles, rows = tiles_of(architecture, query, value), rows_of_group(group)
    full = (batch, heads, 1, keys)
    bias = None if call.bias is None else call.bias.expand(full)
    mask = None if call.mask is None else call.mask.view(torch.uint8).expand(full)
    softcap, scale, natural = call.softcap, call.scale, natural_scores(call)
    unit = 1.0 if natural else LOG2E
    exact = query.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest" or torch.version.hip
    arguments = {
        "query": query, "key": key, "value": value, "output": output, "lse": lse, "bias": bias, "mask": mask,
        "query_ids": call.query_segment_ids, "key_ids": call.key_segment_ids,
        "sinks": adjacent(call.sinks), "lengths": adjacent(lengths), "query_strides": query.stride(),
        "key_strides": key.stride(), "value_strides": value.stride(), "bias_strides": _strides(bias),
        "mask_strides": _strides(mask), "query_id_strides": _strides(call.query_segment_ids),
        "key_id_strides": _strides(call.key_segment_ids), "H": heads, "S": keys, "left": call.left,
        "scale": scale * unit if softcap is None else scale / softcap,
        "cap": None if softcap is None else softcap * unit, "GROUP": group, "SPLITS": splits, "D": dim,
        "DV": value_dim, "BLOCK_M": rows, "BLOCK_N": tiles.block_n, "BLOCK_D": power_of_two(dim),
        "BLOCK_DV": power_of_two(value_dim), "PRECISION": "ieee" if exact else "tf32",
        "NATURAL": natural,
    }  # fmt: skip
    programs = batch * kv_heads * -(-group // rows) * splits
    return Call(decode_split, programs, arguments, tiles.num_warps, tiles.num_stages)


def merge_call(partial: Tensor, lse: Tensor, output: Tensor, call: AttentionCall) -> Call:
    """Fills output (B, 1, H, Dv), contiguous, from what `split_call` of the same call fills."""
    batch, heads, splits, value_dim = partial.shape
    arguments = {
        "partial": partial, "lse": lse, "output": output, "sinks": adjacent(call.sinks),
        "H": heads, "SPLITS": splits, "DV": value_dim, "BLOCK_SPLITS": power_of_two(splits),
        "BLOCK_DV": power_of_two(value_dim), "NATURAL": natural_scores(call),
    }  # fmt: skip
    return Call(decode_merge, batch * heads, arguments)


def typical_calls(dtype: torch.dtype, architecture: str) -> Iterator[tuple[str, Call]]:
    """Caches of 4096 keys for each width of the table; at the usual one also without splits, and every feature."""
    lengths = torch.empty(8, dtype=torch.int32, device="meta")
    for dim, heads, kv_heads in ((64, 16, 16), (128, 32, 8), (256, 8, 4)):
        query = torch.empty(8, 1, heads, dim, dtype=dtype, device="meta")
        cache = torch.empty(8, 4096, kv_heads, dim, dtype=dtype, device="meta")
        partial = torch.empty(8, heads, 8, dim, dtype=torch.float32, device="meta")
        lse = torch.empty(8, heads, 2, 8, dtype=torch.float32, device="meta")
        plain = AttentionCall(scale=dim**-0.5)
        yield f"decode_split_{dim}", split_call(architecture, query, cache, cache, partial, lse, 8, lengths, plain)
        if dim != 128:
            continue
        yield "decode_whole", split_call(architecture, query, cache, cache, query, None, 1, lengths, plain)
        yield "decode_merge", merge_call(partial, lse, query, plain)
        ids = torch.empty(8, 4096, dtype=torch.int32, device="meta")
        everything = AttentionCall(
            bias=torch.empty(1, heads, 1, 4096, dtype=dtype, device="meta"),
            mask=torch.empty(8, 1, 1, 4096, dtype=torch.bool, device="meta"), query_segment_ids=ids[:, :1],
            key_segment_ids=ids,
            sinks=torch.empty(heads, dtype=dtype, device="meta"), left=511, softcap=30.0, scale=0.1,
        )  # fmt: skip
        yield "decode_everything", split_call(architecture, query, cache, cache, query, None, 1, lengths, everything)


def _strides(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.stride()
