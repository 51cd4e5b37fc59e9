"""`linear` as a custom operator with gradients, for libraries that torch cannot differentiate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def define(name: str, run: Run, transposed: Callable[[Tensor, Tensor], Tensor] | None = None) -> Run:
    """The operator `easytorch::<name>`: x (M, K), weight (N, K), bias (N,) -> (M, N), differentiable any number of
    times.

    run computes it on a CPU. transposed(a (M, K), b (N, K)) -> a @ b.T computes its gradients; None: the operator
    itself does.
    """

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return run(x, weight, bias)

    operator = torch.library.custom_op(f"easytorch::{name}", linear, mutates_args=(), device_types="cpu")

    @operator.register_fake
    def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[0])

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        x, weight, _ = inputs
        # the gradient of each needs only the other
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return operator(a, b, None) if transposed is None else transposed(a, b)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return (
            None if weight is None else product(grad, weight.t()),
            None if x is None else product(grad.t(), x.t()),
            grad.sum(0) if ctx.needs_input_grad[2] else None,
        )

    operator.register_autograd(backward, setup_context=keep)

    @operator.register_vmap
    def _(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        """vmap: batched inputs become more rows; batched weights use ATen's batched product."""
        x_dim, weight_dim, bias_dim = in_dims
        if weight_dim is None and bias_dim is None and x_dim is not None:
            rows = x.movedim(x_dim, 0)
            return operator(rows.flatten(0, 1), weight, bias).unflatten(0, rows.shape[:2]), 0
        x, weight = (
            tensor[None] if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in ((x, x_dim), (weight, weight_dim))
        )
        result = x @ weight.transpose(1, 2)
        if bias is not None:
            result = result + (bias if bias_dim is None else bias.movedim(bias_dim, 0)[:, None])
        return result, 0

    return operator
