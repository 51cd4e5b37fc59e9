"""Layer norm by ATen, which like the definition normalizes in float32 and rounds once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.layer_norm.native import check_tensors

# Up to this many rows ATen's 16-bit sums of gradients are accurate enough: 0.35% off in bfloat16, 0.04% in float16.
FEW_ROWS = 4
# Up to this many elements a 16-bit call is cheapest computed in float32 at once; a larger one is widened in blocks of
# that size, whose copies stay in a core's cache.
SMALL = 2**15
BLOCK = 2**18


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """The definition's result to within one or two units in the last place of x's dtype, for any mix of dtypes.

    On the CPU ATen sums the gradients of a 16-bit call's weight and bias in 16 bits, whatever their own dtype: 0.5% off
    at 4096 rows of float16, 5% of bfloat16 (torch 2.13). Here they are summed in float32.
    """
    check_tensors(x, weight, bias, eps)
    shape = x.shape[-1:]
    same = (weight is None or weight.dtype == x.dtype) and (bias is None or bias.dtype == x.dtype)
    if same and (x.dtype.itemsize > 2 or not recording(weight, bias) or x.numel() <= FEW_ROWS * shape[0]):
        return torch.layer_norm(x, shape, weight, bias, eps)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight, bias = (None if vector is None else vector.to(wide) for vector in (weight, bias))
    # torch.compile fuses the casts below
    if same and x.numel() > SMALL and not torch.compiler.is_compiling():
        return _HalfLayerNorm.apply(x, weight, bias, eps)[0]
    return torch.layer_norm(x.to(wide), shape, weight, bias, eps).to(x.dtype)


class _HalfLayerNorm(torch.autograd.Function):
    """x in 16 bits, weight and bias in 32; the gradients are summed in float32, by blocks of rows.

    The backward is made of differentiable ATen operations, so there are gradients of every order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:3], *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        shape, wanted = x.shape[-1:], list(ctx.needs_input_grad[:3])
        rows = max(1, BLOCK // shape[0])
        blocks = (t.reshape(-1, t.shape[-1]).split(rows) for t in (grad, x, mean, rstd))
        x_grads: list[Tensor] = []
        totals: list[Tensor | None] = [None, None]
        for part in zip(*blocks, strict=True):
            g, values, center, scale = (t.float() for t in part)
            x_grad, *sums = torch.ops.aten.native_layer_norm_backward(
                g, values, shape, center, scale, weight, bias, wanted
            )
            if wanted[0]:
                x_grads.append(x_grad.to(x.dtype))
            totals = [new if total is None else total + new for total, new in zip(totals, sums, strict=True)]
        return torch.cat(x_grads).reshape(x.shape) if x_grads else None, *totals, None
