"""quantized_matmul in jax, forward and backward: Pallas where it is lowered for a TPU, a plain product elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from easytorch.kernels.quantized_matmul import pallas_kernels
from easytorch.kernels.quantized_matmul.formats import FORMATS, LEVELS


def forward(
    x: Array, bias: Array | None, data: Array, scale: Array, zero: Array | None, *, format: str, group_size: int
) -> tuple[Array]:
    """x (M, K), bias (N,), data (N, stored), scale and zero (N or 1, groups) -> (M, N), in a tuple; see weight.py."""
    if x.size == 0:
        output = jnp.zeros((x.shape[0], data.shape[0]), x.dtype)
    else:
        output = _dispatch(
            pallas_kernels.quantized_matmul, _product, x, data, scale, zero, format=format, group_size=group_size,
            columns=x.shape[1],
        )  # fmt: skip
    if bias is not None:
        output = (output.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
    return (output,)


def backward(
    x: Array, bias: Array | None, data: Array, scale: Array, zero: Array | None, output: Array, grad: Array,
    *, format: str, group_size: int,
) -> tuple[Array | None, ...]:  # fmt: skip
    """The gradients of x and bias; the weight is frozen."""
    if x.size == 0:
        x_grad = jnp.zeros_like(x)
    else:
        input_grad = functools.partial(pallas_kernels.quantized_input_grad, columns=x.shape[1])
        x_grad = _dispatch(
            input_grad, _input_product, grad, data, scale, zero, format=format, group_size=group_size,
            columns=x.shape[1],
        )  # fmt: skip
    bias_grad = None if bias is None else grad.astype(jnp.float32).sum(0).astype(bias.dtype)
    return x_grad, bias_grad, None, None, None


def dequantize(data: Array, scale: Array, zero: Array | None, *, format: str, group_size: int, columns: int) -> Array:
    """The weight (N, K), float32."""

    def spread(parameter: Array) -> Array:
        wide = parameter.astype(jnp.float32)
        return wide if wide.shape[1] == 1 else jnp.repeat(wide, group_size, axis=1)[:, :columns]

    numbers = data
    if FORMATS[format].packed:
        numbers = jnp.stack([data >> 4, data & 15], -1).reshape(data.shape[0], -1)[:, :columns]
    if format in LEVELS:
        numbers = jnp.asarray(LEVELS[format], jnp.float32)[numbers.astype(jnp.int32)]
    elif format == "int4":
        numbers = numbers.astype(jnp.float32) - (8.0 if zero is None else spread(zero))
    return numbers.astype(jnp.float32) * spread(scale)


def _dispatch(
    pallas: Callable[..., Array], plain: Callable[..., Array], rows: Array, data: Array, scale: Array,
    zero: Array | None, *, format: str, group_size: int, columns: int,
) -> Array:  # fmt: skip
    """`pallas` where it is lowered for a TPU and takes the groups, else `plain`."""
    default = functools.partial(plain, format=format, group_size=group_size, columns=columns)
    if not pallas_kernels.carries(format, scale.shape[1], group_size):
        return default(rows, data, scale, zero)
    on_tpu = functools.partial(_as_bytes, pallas, format=format, group_size=group_size)
    return lax.platform_dependent(rows, data, scale, zero, tpu=on_tpu, default=default)


def _as_bytes(
    pallas: Callable[..., Array], rows: Array, data: Array, scale: Array, zero: Array | None,
    *, format: str, group_size: int,
) -> Array:  # fmt: skip
    """The kernels read bytes and float32, one scale per row at least."""
    stored = data if data.dtype in (jnp.int8, jnp.uint8) else lax.bitcast_convert_type(data, jnp.int8)

    def by_row(parameter: Array) -> Array:
        return jnp.broadcast_to(parameter.astype(jnp.float32), (data.shape[0], parameter.shape[1]))

    zeros = None if zero is None else by_row(zero)
    return pallas(rows, stored, by_row(scale), zeros, format=format, group_size=group_size)


def _product(
    x: Array, data: Array, scale: Array, zero: Array | None, *, format: str, group_size: int, columns: int
) -> Array:
    weight = dequantize(data, scale, zero, format=format, group_size=group_size, columns=columns)
    return jnp.einsum("mk,nk->mn", x.astype(jnp.float32), weight, precision=lax.Precision.HIGHEST).astype(x.dtype)


def _input_product(
    grad: Array, data: Array, scale: Array, zero: Array | None, *, format: str, group_size: int, columns: int
) -> Array:
    weight = dequantize(data, scale, zero, format=format, group_size=group_size, columns=columns)
    return jnp.einsum("mn,nk->mk", grad.astype(jnp.float32), weight, precision=lax.Precision.HIGHEST).astype(grad.dtype)
