"""The launches of the Triton selective scan. Imports Triton: import it inside the function that needs it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from easytorch.kernels.interop.triton_call import Call, power_of_two
from easytorch.kernels.ssm1.scan import TOKENS
from easytorch.kernels.ssm1.triton_kernels import ssm1_forward

# One warp per program and one channel per thread: many programs hide each other's latency.
CHANNELS = 32


def forward_call(
    step: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    first: torch.Tensor | None, output: torch.Tensor, last: torch.Tensor, kept: torch.Tensor,
) -> Call:  # fmt: skip
    """Fills output (B, T, C), last (B, N, C) and kept (blocks, B, N, C)."""
    batch, length, channels = x.shape
    arguments = {
        "step": step, "x": x, "A": A, "B": B, "C": C, "state": state, "first": first, "output": output, "last": last,
        "kept": kept, "T": length, "CHANNELS": channels, "N": A.shape[0], "BATCH": batch, "BLOCK": TOKENS,
        "BLOCK_N": power_of_two(A.shape[0]), "BLOCK_C": CHANNELS, "UNROLL": 4,
    }  # fmt: skip
    return Call(ssm1_forward, batch * -(-channels // CHANNELS), arguments, num_warps=1)


def typical_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Mamba 2.8B; the scan is float32 whatever the dtype of the tokens."""
    x, A = torch.empty(1, 4096, 5120, device="meta"), torch.empty(16, 5120, device="meta")
    B, state = torch.empty(1, 4096, 16, device="meta"), torch.empty(1, 16, 5120, device="meta")
    kept, first = torch.empty(64, 1, 16, 5120, device="meta"), torch.empty(1, 4096, dtype=torch.uint8, device="meta")
    for name, forget in (("mamba_2.8b", None), ("documents", first)):
        yield name, forward_call(x, x, A, B, B, state, forget, x, state, kept)
