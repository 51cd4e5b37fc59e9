"""grouped_matmul in jax, forward and backward: Pallas where it is lowered for a TPU, `lax.ragged_dot` elsewhere."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array, lax

from easytorch.kernels.grouped_matmul import pallas_kernels


def forward(
    x: Array, weight: Array, group_sizes: Array, bias: Array | None = None, *, transposed: bool
) -> tuple[Array]:
    """x (M, K), weight (E, K, N) (transposed: (E, N, K)), group_sizes (E,), bias (E, N) -> (M, N), in a tuple.

    Rows past the sum of the sizes are zeros; sizes past M are cut off.
    """
    output = _multiply(x, weight, _within(group_sizes, x.shape[0]), transposed)
    if bias is None:
        return (output,)
    wide = output.astype(jnp.float32) + _rows_of(bias, group_sizes, x.shape[0])
    return (wide.astype(x.dtype),)


def backward(
    x: Array, weight: Array, group_sizes: Array, bias: Array | None, output: Array, grad: Array, *, transposed: bool
) -> tuple[Array | None, ...]:
    """The gradients of x, weight, group_sizes (None) and bias."""
    sizes = _within(group_sizes, x.shape[0])
    x_grad = _multiply(grad, weight, sizes, not transposed)
    weight_grad = _weight_grad(grad, x, sizes) if transposed else _weight_grad(x, grad, sizes)
    bias_grad = None
    if bias is not None:
        member = _experts(group_sizes, x.shape[0])[:, None] == jnp.arange(bias.shape[0])
        summed = jnp.einsum(
            "me,mn->en", member.astype(jnp.float32), jnp.where(member.any(1)[:, None], grad, 0).astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )  # fmt: skip
        bias_grad = summed.astype(bias.dtype)
    return x_grad, weight_grad, None, bias_grad


def _multiply(x: Array, weight: Array, sizes: Array, transposed: bool) -> Array:
    if 0 in (*x.shape, *weight.shape):
        return jnp.zeros((x.shape[0], weight.shape[1 if transposed else 2]), x.dtype)
    return lax.platform_dependent(
        x, weight, sizes,
        tpu=functools.partial(pallas_kernels.grouped_matmul, transposed=transposed),
        default=functools.partial(_ragged_dot, transposed=transposed),
    )  # fmt: skip


def _weight_grad(left: Array, right: Array, sizes: Array) -> Array:
    if 0 in (*left.shape, *right.shape, *sizes.shape):
        return jnp.zeros((sizes.shape[0], left.shape[1], right.shape[1]), left.dtype)
    return lax.platform_dependent(
        left, right, sizes, tpu=pallas_kernels.grouped_weight_grad, default=_ragged_weight_grad
    )


def _ragged_dot(x: Array, weight: Array, sizes: Array, *, transposed: bool) -> Array:
    matrices = weight.swapaxes(1, 2) if transposed else weight
    member = _experts(sizes, x.shape[0])[:, None] < sizes.shape[0]
    output = lax.ragged_dot(
        jnp.where(member, x, 0), matrices, sizes, precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return jnp.where(member, output, 0.0).astype(x.dtype)


def _ragged_weight_grad(left: Array, right: Array, sizes: Array) -> Array:
    member = _experts(sizes, left.shape[0])[:, None] < sizes.shape[0]
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    output = lax.ragged_dot_general(
        jnp.where(member, left, 0), jnp.where(member, right, 0), sizes, dimensions, precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return output.astype(left.dtype)


def _within(group_sizes: Array, rows: int) -> Array:
    """The sizes that fit into `rows`, none negative, int32."""
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes, 0)), rows)
    return jnp.diff(ends, prepend=0).astype(jnp.int32)


def _experts(group_sizes: Array, rows: int) -> Array:
    """(M,): the expert of each row, E where it has none."""
    return jnp.searchsorted(jnp.cumsum(jnp.maximum(group_sizes, 0)), jnp.arange(rows), side="right")


def _rows_of(bias: Array, group_sizes: Array, rows: int) -> Array:
    """The bias of each row's expert, float32 (M, N); zeros where it has none."""
    return jnp.take(bias, _experts(group_sizes, rows), axis=0, mode="fill", fill_value=0).astype(jnp.float32)
