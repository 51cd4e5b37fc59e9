"""A grouped matmul as torch operators, differentiable any number of times, from two functions that compute.

The sizes of the groups are data: an operator keeps them out of the graph, so that one graph serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.interop.torch_func import eager, recording

Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]
WeightGrad = Callable[[Tensor, Tensor, Tensor], Tensor]


def define(library: str, forward: Forward, weight_grad: WeightGrad) -> Forward:
    """The differentiable operator `easytorch::<library>_grouped_matmul`, of the arguments of `forward`.

    forward(x, weight, group_sizes, bias, transposed): as native.py says, into a new tensor.
    weight_grad(left (M, A), right (M, B), group_sizes) -> (E, A, B): left^T @ right of the rows of each group.
    """

    def product(x: Tensor, weight: Tensor, group_sizes: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        return forward(x, weight, group_sizes, bias, transposed)

    def outer(left: Tensor, right: Tensor, group_sizes: Tensor) -> Tensor:
        return weight_grad(left, right, group_sizes)

    multiply = torch.library.custom_op(f"easytorch::{library}_grouped_matmul", product, mutates_args=())
    multiply_groups = torch.library.custom_op(f"easytorch::{library}_grouped_weight_grad", outer, mutates_args=())

    @multiply.register_fake
    def _(x: Tensor, weight: Tensor, group_sizes: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[1 if transposed else 2])

    @multiply_groups.register_fake
    def _(left: Tensor, right: Tensor, group_sizes: Tensor) -> Tensor:
        return left.new_empty(group_sizes.shape[0], left.shape[1], right.shape[1])

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, group_sizes, _, ctx.transposed = inputs
        ctx.save_for_backward(x, weight, group_sizes)

    def product_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, sizes = ctx.saved_tensors
        x_grad = weight_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = run(grad, weight, sizes, None, not ctx.transposed)
        if ctx.needs_input_grad[1]:
            weight_grad = run_groups(grad, x, sizes) if ctx.transposed else run_groups(x, grad, sizes)
        if ctx.needs_input_grad[3]:
            bias_grad = run_groups(grad.new_ones(grad.shape[0], 1), grad, sizes)[:, 0]
        return x_grad, weight_grad, None, bias_grad, None

    def keep_groups(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def outer_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, sizes = ctx.saved_tensors
        left_grad = run(right, grad, sizes, None, True) if ctx.needs_input_grad[0] else None
        right_grad = run(left, grad, sizes, None, False) if ctx.needs_input_grad[1] else None
        return left_grad, right_grad, None

    multiply.register_autograd(product_grads, setup_context=keep)
    multiply_groups.register_autograd(outer_grads, setup_context=keep_groups)

    class Product(torch.autograd.Function):
        """`multiply` where nothing is traced: an operator written in Python takes 75 us more."""

        forward = staticmethod(product)
        setup_context = staticmethod(keep)
        backward = staticmethod(product_grads)

    class Outer(torch.autograd.Function):
        forward = staticmethod(outer)
        setup_context = staticmethod(keep_groups)
        backward = staticmethod(outer_grads)

    def run(x: Tensor, weight: Tensor, group_sizes: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        arguments = (x, weight, group_sizes, bias, transposed)
        if torch.jit.is_tracing() or not eager():  # an autograd.Function cannot be saved in a trace
            return multiply(*arguments)
        return Product.apply(*arguments) if recording(x, weight, bias) else forward(*arguments)

    def run_groups(left: Tensor, right: Tensor, group_sizes: Tensor) -> Tensor:
        arguments = (left, right, group_sizes)
        if torch.jit.is_tracing() or not eager():  # an autograd.Function cannot be saved in a trace
            return multiply_groups(*arguments)
        return Outer.apply(*arguments) if recording(left, right) else weight_grad(*arguments)

    return run
