"""The launches of the Triton convolution. Imports Triton: import it inside the function that needs it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from easytorch.kernels.causal_conv1d.triton_kernels import (
    conv_backward_sums,
    conv_backward_tokens,
    conv_forward,
)
from easytorch.kernels.interop.triton_call import Call, power_of_two

# Tokens by channels of a tile: the taps of its neighbours come from the cache.
TOKENS, CHANNELS = 32, 128


def forward_call(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None,
    number: torch.Tensor | None, output: torch.Tensor, silu: bool,
) -> Call:  # fmt: skip
    """Fills output (B, T, C)."""
    arguments = {
        "x": x, "weight": weight, "bias": bias, "state": state, "number": number, "output": output,
        "x_strides": x.stride(), "SILU": silu, **_sizes(x, weight),
    }  # fmt: skip
    return Call(conv_forward, tiles(x) * _columns(x), arguments)


def backward_sums_call(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None,
    number: torch.Tensor | None, sums_grad: torch.Tensor, weight_parts: torch.Tensor, bias_parts: torch.Tensor,
    silu: bool,
) -> Call:  # fmt: skip
    """Fills sums_grad (B, T, C), weight_parts (tiles, W, C) and bias_parts (tiles, C), all float32."""
    arguments = {
        "grad": grad, "x": x, "weight": weight, "bias": bias, "state": state, "number": number, "sums_grad": sums_grad,
        "weight_parts": weight_parts, "bias_parts": bias_parts, "grad_strides": grad.stride(),
        "x_strides": x.stride(), "SILU": silu, **_sizes(x, weight),
    }  # fmt: skip
    # eight warps: at four, documents and taps together run out of registers
    return Call(conv_backward_sums, tiles(x) * _columns(x), arguments, num_warps=8)


def backward_tokens_call(
    sums_grad: torch.Tensor, weight: torch.Tensor, number: torch.Tensor | None, x_grad: torch.Tensor,
    state_grad: torch.Tensor,
) -> Call:  # fmt: skip
    """Fills x_grad (B, T, C) and state_grad (B, C, W-1)."""
    arguments = {
        "sums_grad": sums_grad, "weight": weight, "number": number, "x_grad": x_grad, "state_grad": state_grad,
        **_sizes(x_grad, weight),
    }  # fmt: skip
    return Call(conv_backward_tokens, tiles(x_grad, weight.shape[1] - 1) * _columns(x_grad), arguments)


def tiles(x: torch.Tensor, past: int = 0) -> int:
    """How many tiles of tokens x (B, T, C) has, with `past` more tokens in each sequence."""
    return x.shape[0] * -(-(x.shape[1] + past) // TOKENS)


def typical_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Mamba 2.8B; documents and a state at the width of a small model."""
    for name, channels, extra in (("mamba_2.8b", 5120, False), ("documents", 1536, True)):
        x, weight = torch.empty(1, 4096, channels, dtype=dtype, device="meta"), torch.empty(channels, 4, device="meta")
        number = torch.empty(1, 4096, dtype=torch.int32, device="meta") if extra else None
        past, wide = torch.empty(1, channels, 3, device="meta"), torch.empty(1, 4096, channels, device="meta")
        state, bias = past if extra else None, weight[:, 0].contiguous()
        parts = torch.empty(tiles(x), 4, channels, device="meta")
        yield name, forward_call(x, weight, bias, state, number, x, True)
        yield (
            f"{name}_backward_sums",
            backward_sums_call(x, x, weight, bias, state, number, wide, parts, parts[:, 0].contiguous(), True),
        )
        yield f"{name}_backward_tokens", backward_tokens_call(wide, weight, number, x, past)


def _columns(x: torch.Tensor) -> int:
    return -(-x.shape[2] // _block(x))


def _block(x: torch.Tensor) -> int:
    return min(CHANNELS, power_of_two(x.shape[2]))


def _sizes(x: torch.Tensor, weight: torch.Tensor) -> dict[str, int]:
    return {
        "T": x.shape[1], "CHANNELS": x.shape[2], "W": weight.shape[1], "BLOCK_T": TOKENS, "BLOCK_C": _block(x),
    }  # fmt: skip
