"""Rotary position embedding by ATen with fewer passes over the heads than the definition; see native.py.

Halves: in float32 one product and two in-place multiply-adds, 0.2 to 0.8 of the definition's time (2 cores, B1 T2048
H32 KV8 D128 and B4 T512 H16 D64); in 16 bits, where ATen's multiply-add is slow, the definition's steps without the
negation and two of its copies. Pairs: one complex product.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.interop.torch_func import eager, forward_mode
from easytorch.kernels.rotary import native

# Below this many elements of the query the definition's gradient is faster: each of our two backward calls costs 50 us
# of Python.
FEW_TO_LEARN = 2**16


def supports(cos: Tensor, sin: Tensor) -> str | None:
    """None when this path takes the call, else the reason."""
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return "gradients of the tables are taken by the definition"
    return None


def rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False,
    position_ids: Tensor | None = None, offset: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition's result up to rounding, with fewer roundings. Differentiable in query and key, any number of
    times."""
    learning = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    # torch.compile fuses it; in forward mode halves of a result may not be written to
    if torch.compiler.is_compiling() or forward_mode() or (learning and query.numel() < FEW_TO_LEARN):
        return native.rotary(
            query, key, cos, sin, interleaved=interleaved, position_ids=position_ids, offset=offset
        )  # fmt: skip
    cos, sin = native.tables(query, key, cos, sin, position_ids, offset)
    if query.shape[1] == 1 and query.dtype == key.dtype and not (interleaved or torch.is_grad_enabled()):
        return _turn_one_token(query, key, cos, sin)
    if interleaved:
        half = cos.shape[-1] // 2
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        turns = torch.complex(cos[..., :half].to(wide), sin[..., :half].to(wide))
        return _turn_pairs(query, turns), _turn_pairs(key, turns)
    below, above = sin.chunk(2, -1)
    if learning:
        return _Halves.apply(query, cos, below, above), _Halves.apply(key, cos, below, above)
    signed = _signed(query, cos, below, above)
    return _turn_halves(query, cos, below, above, signed), _turn_halves(key, cos, below, above, signed)


def _turn_one_token(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Halves, in the fewest calls: for one token a call costs more than its computation, so query and key heads are
    computed together. Splitting the result takes half the time of two slices."""
    heads = torch.cat((query, key), 2)
    dim = cos.shape[-1]
    turned, rest = (heads, None) if dim == heads.shape[-1] else heads.split_with_sizes((dim, heads.shape[-1] - dim), -1)
    output = turned * cos
    # not written to, and not made by a torch function mode or a transform
    signs = _kept_signs(dim, sin.dtype) if eager() else _signs(dim, sin.dtype)
    swapped, signed = turned.roll(dim // 2, -1), sin * signs
    if heads.dtype.itemsize == 2 and cos.dtype == heads.dtype:  # the same steps as for many tokens, so the same bits
        output.add_(swapped.mul_(signed))
    else:
        output.addcmul_(swapped, signed)
    if output.dtype != heads.dtype:
        output = output.to(heads.dtype)
    if rest is not None:
        output = torch.cat((output, rest), -1)
    turned_query, turned_key = output.split_with_sizes((query.shape[2], key.shape[2]), 2)
    return turned_query, turned_key


def _signs(dim: int, dtype: torch.dtype) -> Tensor:
    """(R,), the signs of the sines when the halves of a head are swapped: -1 for the first, 1 for the second."""
    half = torch.ones(dim // 2, dtype=dtype, device="cpu")
    return torch.cat((-half, half))


_kept_signs = functools.lru_cache(maxsize=16)(torch.inference_mode(False)(_signs))


def _turn_pairs(x: Tensor, turns: Tensor) -> Tensor:
    """x (B, T, H, D), rotations (B or 1, T, 1, R / 2) complex."""
    dim = 2 * turns.shape[-1]
    wide = torch.float64 if turns.dtype == torch.complex128 else torch.float32
    pairs = torch.view_as_complex(x[..., :dim].to(wide).unflatten(-1, (-1, 2)).contiguous())
    rotated = torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), dim=-1)


def _turn_halves(x: Tensor, cos: Tensor, below: Tensor, above: Tensor, signed: Tensor | None) -> Tensor:
    """x (B, T, H, D), cos (B or 1, T, 1, R), below and above (B or 1, T, 1, R / 2): the two halves of the sines."""
    dim = cos.shape[-1]
    turned, rest = (x, None) if dim == x.shape[-1] else x.split((dim, x.shape[-1] - dim), -1)
    first, second = turned.chunk(2, -1)
    output = turned * cos
    if signed is None:
        low, high = output.chunk(2, -1)
        low.addcmul_(second, below, value=-1)
        high.addcmul_(first, above)
    else:
        output.add_(torch.cat((second, first), -1).mul_(signed))
    if output.dtype != x.dtype:
        output = output.to(x.dtype)
    return output if rest is None else torch.cat((output, rest), -1)


def _signed(x: Tensor, cos: Tensor, below: Tensor, above: Tensor) -> Tensor | None:
    """The signed sines that the swapped halves are multiplied by, in 16 bits."""
    return torch.cat((-below, above), -1) if x.dtype.itemsize == 2 and cos.dtype == x.dtype else None


class _Halves(torch.autograd.Function):
    """A rotation by halves; its gradient is the rotation back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, below: Tensor, above: Tensor) -> Tensor:
        return _turn_halves(x, cos, below, above, _signed(x, cos, below, above))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, below, above = ctx.saved_tensors
        return _Halves.apply(grad, cos, -above, -below), None, None, None
