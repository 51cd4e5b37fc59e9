"""The launches of the Triton scan of Mamba-2. Imports Triton: import it inside the function that needs it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from easytorch.kernels.interop.triton_call import Call, power_of_two
from easytorch.kernels.recurrence.triton_precision import precision
from easytorch.kernels.ssm2.triton_kernels import ssm2_forward

CHUNK = 16
# A 32 x 128 state and the tiles of a chunk fit the registers of four warps, with tf32 products.
CHANNELS = 32


def forward_call(
    x: torch.Tensor, step: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    number: torch.Tensor | None, output: torch.Tensor, last: torch.Tensor, products: str | None = None,
) -> Call:  # fmt: skip
    """Fills output (B, T, H, P) and last (B, H, P, N). products: the precision of matrix products; None: this machine's
    default."""
    batch, length, heads, width = x.shape
    groups, size = B.shape[2:]
    block = min(CHANNELS, power_of_two(width))
    arguments = {
        "x": x, "step": step, "A": A, "B": B, "C": C, "state": state, "number": number, "output": output, "last": last,
        "x_strides": x.stride(), "B_strides": B.stride(), "C_strides": C.stride(), "T": length, "H": heads,
        "SHARED": heads // groups, "P": width, "N": size, "L": CHUNK, "BLOCK_P": block,
        "BLOCK_N": power_of_two(size), "PRECISION": products or precision(x.dtype),
    }  # fmt: skip
    return Call(ssm2_forward, batch * heads * -(-width // block), arguments, num_warps=4)


def typical_calls(dtype: torch.dtype, architecture: str) -> Iterator[tuple[str, Call]]:
    """Mamba2 2.7B."""
    x = torch.empty(1, 4096, 80, 64, dtype=dtype, device="meta")
    B = torch.empty(1, 4096, 1, 128, dtype=dtype, device="meta")
    step, A = torch.empty(1, 4096, 80, device="meta"), torch.empty(80, device="meta")
    state = torch.empty(1, 80, 64, 128, device="meta")
    products = "ieee" if architecture.startswith("gfx") else "tf32"
    yield "mamba2_2.7b", forward_call(x, step, A, B, B, state, None, x, state, products)
