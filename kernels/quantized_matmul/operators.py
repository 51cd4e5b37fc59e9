"""A quantized matmul as custom operators, differentiable any number of times, made of two functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.interop.torch_func import eager, recording
from easytorch.kernels.quantized_matmul.formats import storage
from easytorch.kernels.quantized_matmul.interleaved import rows_of
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight

Forward = Callable[[Tensor, QuantizedWeight, Tensor | None], Tensor]
InputGrad = Callable[[Tensor, QuantizedWeight], Tensor]


def _traced_bytes(data: Tensor) -> Tensor:
    """A weight's codes in a trace by torch.jit (2.13), which saves no view as another dtype.

    A constant of the trace is viewed outside of it: with gradients TorchScript compares constants, and cannot compare
    fp8. A buffer stays a buffer.
    """
    tracer: Any = torch._C  # whose stubs leave these functions out
    if not data.is_floating_point() or tracer._get_value_trace(data).node().kind() != "prim::Constant":
        return data
    tracing = tracer._get_tracing_state()
    tracer._set_tracing_state(None)
    try:
        return data.view(torch.uint8)
    finally:
        tracer._set_tracing_state(tracing)


def define(library: str, forward: Forward, input_grad: InputGrad) -> Forward:
    """The differentiable function of `forward`, on the operator `easytorch::<library>_quantized_matmul`.

    forward(x (M, K), weight, bias) -> (M, N); input_grad(grad (M, N), weight) -> (M, K), grad @ the weight; both into
    new tensors of the first argument's dtype.
    """

    def rebuilt(
        data: Tensor, scale: Tensor, zero: Tensor | None, packed: Tensor | None, packed_scale: Tensor | None,
        format: str, columns: int, group_size: int,
    ) -> QuantizedWeight:  # fmt: skip
        stored, shape = data.view(storage(format, columns)[1]), (rows_of(data, format, columns), columns)
        return QuantizedWeight(stored, scale, zero, format, shape, group_size, packed, packed_scale)

    def product(
        x: Tensor, bias: Tensor | None, data: Tensor, scale: Tensor, zero: Tensor | None, packed: Tensor | None,
        packed_scale: Tensor | None, format: str, columns: int, group_size: int,
    ) -> Tensor:  # fmt: skip
        return forward(x, rebuilt(data, scale, zero, packed, packed_scale, format, columns, group_size), bias)

    def transposed(
        grad: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, packed: Tensor | None,
        packed_scale: Tensor | None, format: str, columns: int, group_size: int,
    ) -> Tensor:  # fmt: skip
        return input_grad(grad, rebuilt(data, scale, zero, packed, packed_scale, format, columns, group_size))

    multiply = torch.library.custom_op(f"easytorch::{library}_quantized_matmul", product, mutates_args=())
    back = torch.library.custom_op(f"easytorch::{library}_quantized_input_grad", transposed, mutates_args=())

    @multiply.register_fake
    def _(x: Tensor, bias: Tensor | None, data: Tensor, *rest: Any) -> Tensor:
        return x.new_empty(x.shape[0], rows_of(data, rest[-3], rest[-2]))

    @back.register_fake
    def _(grad: Tensor, data: Tensor, *rest: Any) -> Tensor:
        return grad.new_empty(grad.shape[0], rest[-2])

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, bias, *tensors, ctx.format, ctx.columns, ctx.group_size = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = back(grad, *ctx.saved_tensors, ctx.format, ctx.columns, ctx.group_size)
        if ctx.needs_input_grad[1]:
            wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
            bias_grad = grad.to(wide).sum(0).to(ctx.bias_dtype)
        return x_grad, bias_grad, *[None] * 8

    def keep_back(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *tensors, ctx.format, ctx.columns, ctx.group_size = inputs
        ctx.save_for_backward(*tensors)

    def backward_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return multiply(grad, None, *ctx.saved_tensors, ctx.format, ctx.columns, ctx.group_size), *[None] * 8

    multiply.register_autograd(backward, setup_context=keep)
    back.register_autograd(backward_back, setup_context=keep_back)

    def run(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        rows = x.reshape(x.numel() // x.shape[-1], x.shape[-1])
        tracing = torch.jit.is_tracing()
        if eager() and not (tracing or recording(x, bias, weight.scale)):  # without the operator, which costs 40 us
            return forward(rows, weight, bias).reshape(*x.shape[:-1], weight.shape[0])
        # as bytes: opcheck and other tools cannot multiply or compare fp8
        data = _traced_bytes(weight.data) if tracing else weight.data.view(torch.uint8)
        tensors = (data, weight.scale.detach(), weight.zero, weight.packed, weight.packed_scale)
        output = multiply(rows, bias, *tensors, weight.format, weight.shape[1], weight.group_size)
        return output.reshape(*x.shape[:-1], weight.shape[0])

    return run
