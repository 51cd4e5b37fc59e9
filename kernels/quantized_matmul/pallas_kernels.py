"""The quantized matmul of a TPU in Pallas, forward and gradient of x: the weight is dequantized in vector memory.

A byte of int4, nf4 and fp4 holds an even column and the odd one after it. They are not interleaved: x is split into two
planes, its even and its odd columns, and each half of the bytes is multiplied with its plane.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from easytorch.kernels.quantized_matmul.formats import FORMATS, LEVELS
from easytorch.kernels.quantized_matmul.pallas_tuning import LANES, BlockSizes, blocks_of


def carries(format: str, groups: int, group_size: int) -> bool:
    """Whether the kernels take such a weight: a group's stored bytes must divide 128 lanes, or be a multiple of
    them."""
    stored = group_size // 2 if FORMATS[format].packed else group_size
    if groups == 1:
        return True
    even = not FORMATS[format].packed or group_size % 2 == 0
    return even and stored >= 8 and (LANES % stored == 0 or stored % LANES == 0)


def quantized_matmul(
    x: Array, data: Array, scale: Array, zero: Array | None, *, format: str, group_size: int, interpret: bool = False
) -> Array:
    """x (M, K), data (N, stored) int8 or uint8, scale and zero (N, groups) float32 -> (M, N)."""
    rows, outputs = x.shape[0], data.shape[0]
    data = _to_lanes(data)
    blocks = blocks_of(rows, outputs, data.shape[1])
    planes = _planes(x, data.shape[1], FORMATS[format].packed)
    parameters, unit = _parameters(scale, zero, blocks, data.shape[1], format, group_size)
    count = planes.shape[0]
    each = parameters[0].shape[1]
    return pl.pallas_call(
        functools.partial(_forward_kernel, format, unit, len(parameters) == 2),
        grid=(-(-rows // blocks.rows), -(-outputs // blocks.outputs), data.shape[1] // blocks.columns),
        in_specs=[
            pl.BlockSpec((count, blocks.rows, blocks.columns), lambda i, j, k: (0, i, k)),
            pl.BlockSpec((blocks.outputs, blocks.columns), lambda i, j, k: (j, k)),
            *(pl.BlockSpec((None, each, blocks.outputs), lambda i, j, k: (k, 0, j)) for _ in parameters),
        ],
        out_specs=pl.BlockSpec((blocks.rows, blocks.outputs), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), x.dtype),
        scratch_shapes=[pltpu.VMEM((blocks.rows, blocks.outputs), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="quantized_matmul",
    )(planes, data, *parameters)


def _forward_kernel(format: str, unit: int, has_zero: bool, x: Any, data: Any, scale: Any, *rest: Any) -> None:
    zero, output, total = (rest[0][...].T, *rest[1:]) if has_zero else (None, *rest)
    factor = scale[...].T

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    for start in range(0, data.shape[1], LANES):
        for plane, weight in enumerate(_dequantized(format, unit, data, factor, zero, start, x.dtype)):
            total[...] += _dot(x[plane, :, start : start + LANES], weight, 1)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        output[...] = total[...].astype(output.dtype)


def quantized_input_grad(
    grad: Array, data: Array, scale: Array, zero: Array | None, *, format: str, columns: int, group_size: int,
    interpret: bool = False,
) -> Array:  # fmt: skip
    """grad (M, N) -> (M, K), grad @ the weight."""
    rows, outputs = grad.shape
    # the sum runs over the weight's rows: what a tile reads past the last of them must be zero
    rest = -outputs % LANES
    grad, data, scale = (jnp.pad(a, widths) for a, widths in (
        (grad, ((0, 0), (0, rest))), (data, ((0, rest), (0, 0))), (scale, ((0, rest), (0, 0)))
    ))  # fmt: skip
    zero = None if zero is None else jnp.pad(zero, ((0, rest), (0, 0)))
    data = _to_lanes(data)
    stored = data.shape[1]
    blocks = blocks_of(rows, outputs + rest, stored)
    blocks = blocks._replace(outputs=LANES if (outputs + rest) % blocks.outputs else blocks.outputs)
    parameters, unit = _parameters(scale, zero, blocks, stored, format, group_size)
    count = 2 if FORMATS[format].packed else 1
    each = parameters[0].shape[1]
    planes = pl.pallas_call(
        functools.partial(_input_grad_kernel, format, unit, len(parameters) == 2),
        grid=(-(-rows // blocks.rows), stored // blocks.columns, (outputs + rest) // blocks.outputs),
        in_specs=[
            pl.BlockSpec((blocks.rows, blocks.outputs), lambda i, k, j: (i, j)),
            pl.BlockSpec((blocks.outputs, blocks.columns), lambda i, k, j: (j, k)),
            *(pl.BlockSpec((None, each, blocks.outputs), lambda i, k, j: (k, 0, j)) for _ in parameters),
        ],
        out_specs=pl.BlockSpec((count, blocks.rows, blocks.columns), lambda i, k, j: (0, i, k)),
        out_shape=jax.ShapeDtypeStruct((count, rows, stored), grad.dtype),
        scratch_shapes=[pltpu.VMEM((count, blocks.rows, blocks.columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="quantized_input_grad",
    )(grad, data, *parameters)
    return jnp.moveaxis(planes, 0, 2).reshape(rows, count * stored)[:, :columns]


def _input_grad_kernel(format: str, unit: int, has_zero: bool, grad: Any, data: Any, scale: Any, *rest: Any) -> None:
    zero, output, total = (rest[0][...].T, *rest[1:]) if has_zero else (None, *rest)
    factor = scale[...].T

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    for start in range(0, data.shape[1], LANES):
        for plane, weight in enumerate(_dequantized(format, unit, data, factor, zero, start, grad.dtype)):
            total[plane, :, start : start + LANES] += _dot(grad[...], weight, 0)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        output[...] = total[...].astype(output.dtype)


def _dequantized(format: str, unit: int, data: Any, scale: Any, zero: Any, start: int, dtype: Any) -> list[Array]:
    """128 columns of stored bytes from `start`, as one (outputs, 128) for each plane."""
    codes = data[:, start : start + LANES].astype(jnp.int32)
    factor = _spread(scale, unit, start)
    halves = [codes >> 4 & 15, codes & 15] if FORMATS[format].packed else [codes]
    origin = 8.0 if zero is None else _spread(zero, unit, start)
    return [(_numbers(format, half, origin) * factor).astype(dtype) for half in halves]


def _spread(parameter: Any, unit: int, start: int) -> Array:
    """The scale of each of 128 stored columns: (outputs, 1) where a unit fills the lanes, else selected by lane."""
    first = start // unit
    spread = parameter[:, first : first + 1]
    if unit == LANES:
        return spread
    # units that divide 128 are powers of two, so shift; `//` lowers to `sign`, for which jax must know the TPU's
    # version
    of = lax.broadcasted_iota(jnp.int32, (parameter.shape[0], LANES), 1) >> unit.bit_length() - 1
    spread = jnp.broadcast_to(spread, of.shape)
    for index in range(1, LANES // unit):
        spread = jnp.where(of == index, parameter[:, first + index : first + index + 1], spread)
    return spread


def _numbers(format: str, codes: Array, origin: Any) -> Array:
    """int32 codes -> float32. fp8 is decoded from its bits, since not every TPU has the type."""
    if format == "int8":
        return codes.astype(jnp.float32)
    if format == "int4":
        return codes.astype(jnp.float32) - origin
    if format in LEVELS:
        return _level(LEVELS[format], codes, 0, 16)
    mantissa, bias = (3, 7) if format == "fp8_e4m3fn" else (2, 15)
    magnitude = codes & 127
    # shifted to float32's exponent and mantissa; subnormals are multiples of the smallest number
    normal = lax.bitcast_convert_type((magnitude << (23 - mantissa)) + ((127 - bias) << 23), jnp.float32)
    small = magnitude.astype(jnp.float32) * 2.0 ** (1 - bias - mantissa)
    number = jnp.where(magnitude < 1 << mantissa, small, normal)
    if format == "fp8_e4m3fn":
        number = jnp.where(magnitude == 127, jnp.nan, number)
    else:
        number = jnp.where(magnitude >= 124, jnp.where(magnitude == 124, jnp.inf, jnp.nan), number)
    return jnp.where(codes & 128 != 0, -number, number)


def _level(levels: tuple[float, ...], codes: Array, low: int, high: int) -> Array:
    """levels[codes] for codes in [low, high), by bisection."""
    if high - low == 1:
        return jnp.full(codes.shape, levels[low], jnp.float32)
    middle = (low + high) // 2
    return jnp.where(codes < middle, _level(levels, codes, low, middle), _level(levels, codes, middle, high))


def _planes(x: Array, stored: int, packed: bool) -> Array:
    """x (M, K) -> (planes, M, stored): even and odd columns, or one plane of all; padded with zeros."""
    width = stored * (2 if packed else 1)
    x = jnp.pad(x, ((0, 0), (0, width - x.shape[1])))
    return jnp.moveaxis(x.reshape(x.shape[0], stored, 2), 2, 0) if packed else x[None]


def _parameters(
    scale: Array, zero: Array | None, blocks: BlockSizes, stored: int, format: str, group_size: int
) -> tuple[list[Array], int]:
    """Scale and zero as (tiles of columns, units of a tile, N), and the stored columns of a unit, 128 at most.

    N is last: the few units of a tile would be padded to 128 lanes each.
    """
    group = stored if scale.shape[1] == 1 else group_size // (2 if FORMATS[format].packed else 1)
    unit = min(group, LANES)
    tiles, each = stored // blocks.columns, blocks.columns // unit

    def by_tile(parameter: Array) -> Array:
        units = jnp.repeat(parameter, group // unit, axis=1)[:, : tiles * each]
        units = jnp.pad(units, ((0, 0), (0, tiles * each - units.shape[1])))
        return units.T.reshape(tiles, each, -1)

    return [by_tile(parameter) for parameter in (scale, zero) if parameter is not None], unit


def _to_lanes(data: Array) -> Array:
    return jnp.pad(data, ((0, 0), (0, -data.shape[1] % LANES)))


def _dot(left: Array, right: Array, right_axis: int) -> Array:
    """Contracts the last axis of left in full float32; by default the matrix unit rounds operands to bfloat16."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((1,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)
