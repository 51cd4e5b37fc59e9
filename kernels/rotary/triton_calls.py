"""The launch of rotary. Imports Triton: import it inside the function that needs it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from easytorch.kernels.interop.triton_call import Call, power_of_two
from easytorch.kernels.rotary.triton_kernels import rotary_turn

# elements of the heads that a program holds in registers: 32 per thread of four warps
TILE = 4096


def turn_call(
    query: torch.Tensor, key: torch.Tensor, query_output: torch.Tensor, key_output: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, *, interleaved: bool, back: bool,
) -> Call:  # fmt: skip
    """Fills query_output (B, T, H, D) and key_output (B, T, K, D); cos and sin (B or 1, T, R)."""
    batch, length, heads, dim = query.shape
    kv_heads, half = key.shape[2], cos.shape[-1] // 2
    query, key, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, cos, sin))
    columns, rest = power_of_two(half), dim - 2 * half
    blocks = [min(_power_of_two(count), max(1, TILE // (2 * columns))) for count in (heads, kv_heads)]
    strides = {
        f"{name}_{axis}_stride": 0 if axis == "batch" and tensor.shape[0] == 1 else tensor.stride(i)
        for name, tensor, axes in (
            ("query", query, ("batch", "token", "head")),
            ("key", key, ("batch", "token", "head")),
            ("cos", cos, ("batch", "token")),
            ("sin", sin, ("batch", "token")),
        )
        for i, axis in enumerate(axes)
    }
    arguments = {
        "query": query, "key": key, "query_output": query_output, "key_output": key_output, "cos": cos, "sin": sin,
        **strides, "T": length, "H": heads, "K": kv_heads, "D": dim, "HALF": half, "INTERLEAVED": interleaved,
        "BACK": back, "BLOCK_H": blocks[0], "BLOCK_K": blocks[1], "BLOCK_D": columns,
        "BLOCK_REST": power_of_two(rest) if rest else 0,
    }  # fmt: skip
    return Call(rotary_turn, batch * length, arguments)


def typical_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """An 8B model, both layouts, and GPT-J's partial rotation."""
    table = torch.empty(1, 4096, 128, dtype=dtype, device="meta")
    query, key = (torch.empty(2, 4096, heads, 128, dtype=dtype, device="meta") for heads in (32, 8))
    wide = torch.empty(2, 4096, 16, 256, dtype=dtype, device="meta")
    for back in (False, True):
        name = "backward" if back else "forward"
        yield f"halves_{name}", turn_call(query, key, query, key, table, table, interleaved=False, back=back)
        yield f"pairs_{name}", turn_call(query, key, query, key, table, table, interleaved=True, back=back)
        part = table[..., :64]
        yield f"part_{name}", turn_call(wide, wide, wide, wide, part, part, interleaved=True, back=back)


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
