"""The launches of the Triton gated delta rule. Imports Triton: import it inside the function that needs it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from easytorch.kernels.gated_delta_rule.triton_kernels import delta_forward
from easytorch.kernels.interop.triton_call import Call, power_of_two
from easytorch.kernels.recurrence.triton_precision import precision

# Longer chunks or more columns of a state 128 high run out of registers by kilobytes a thread; these by 136 bytes.
CHUNK = 16
COLUMNS = 16


def forward_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor, number: torch.Tensor | None, output: torch.Tensor, last: torch.Tensor,
    products: str | None = None,
) -> Call:  # fmt: skip
    """Fills output (B, T, Hv, Dv) and last (B, Hv, Dk, Dv). products: their precision, None for this machine's."""
    batch, length, heads, width = value.shape
    block = min(COLUMNS, power_of_two(width))
    arguments = {
        "query": query, "key": key, "value": value, "g": g, "beta": beta, "state": state, "number": number,
        "output": output, "last": last, "query_strides": query.stride(), "key_strides": key.stride(),
        "value_strides": value.stride(), "T": length, "H": heads, "SHARED": heads // key.shape[2],
        "DK": key.shape[3], "DV": width, "L": CHUNK, "BLOCK_K": power_of_two(key.shape[3]), "BLOCK_V": block,
        "PRECISION": products or precision(value.dtype),
    }  # fmt: skip
    return Call(delta_forward, batch * heads * -(-width // block), arguments, num_warps=4)


def typical_calls(dtype: torch.dtype, architecture: str) -> Iterator[tuple[str, Call]]:
    """Qwen3-Next."""
    key, g = torch.empty(1, 4096, 16, 128, device="meta"), torch.empty(1, 4096, 32, device="meta")
    value = torch.empty(1, 4096, 32, 128, dtype=dtype, device="meta")
    state = torch.empty(1, 32, 128, 128, device="meta")
    products = "ieee" if architecture.startswith("gfx") else "tf32"
    yield "qwen3_next", forward_call(key, key, value, g, g, state, None, value, state, products)
