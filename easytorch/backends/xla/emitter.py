"""Writes StableHLO, one operation a line, in MLIR's generic syntax, which is the same for all operations and
versions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Graph
from easytorch.backends.partitioning import Sharding
from easytorch.backends.shapes import Shape

ELEMENT_TYPES: dict[DType, str] = {
    DType.BOOL: "i1",
    DType.INT4: "i4",
    DType.INT8: "i8",
    DType.INT16: "i16",
    DType.INT32: "i32",
    DType.INT64: "i64",
    DType.UINT4: "ui4",
    DType.UINT8: "ui8",
    DType.UINT16: "ui16",
    DType.UINT32: "ui32",
    DType.UINT64: "ui64",
    DType.FLOAT8_E4M3FN: "f8E4M3FN",
    DType.FLOAT8_E5M2: "f8E5M2",
    DType.FLOAT8_E4M3FNUZ: "f8E4M3FNUZ",
    DType.FLOAT8_E5M2FNUZ: "f8E5M2FNUZ",
    DType.FLOAT16: "f16",
    DType.BFLOAT16: "bf16",
    DType.FLOAT32: "f32",
    DType.FLOAT64: "f64",
    DType.COMPLEX64: "complex<f32>",
    DType.COMPLEX128: "complex<f64>",
}


class Value(NamedTuple):
    """An SSA value: its name in the text, and its shape."""

    name: str
    shape: Shape

    @property
    def dtype(self) -> DType:
        return self.shape.dtype

    @property
    def dimensions(self) -> tuple[int, ...]:
        return self.shape.dimensions

    @property
    def rank(self) -> int:
        return len(self.shape.dimensions)


@functools.lru_cache(maxsize=4096)
def tensor(shape: Shape) -> str:
    """The type in the text: `tensor<2x3xf32>`."""
    return f"tensor<{''.join(f'{size}x' for size in shape.dimensions)}{ELEMENT_TYPES[shape.dtype]}>"


def int_array(values: Iterable[int]) -> str:
    """An attribute: `array<i64: 0, 1>`."""
    text = ", ".join(map(str, values))
    return f"array<i64: {text}>" if text else "array<i64>"


def pairs(values: Sequence[Sequence[int]]) -> str:
    """An attribute: pairs of integers, as padding and replica groups have."""
    rows, columns = len(values), len(values[0]) if values else 2
    if not rows * columns:
        return f"dense<> : tensor<{rows}x{columns}xi64>"
    text = ", ".join("[" + ", ".join(map(str, row)) + "]" for row in values)
    return f"dense<[{text}]> : tensor<{rows}x{columns}xi64>"


def sdy_sharding(sharding: Sharding) -> str:
    """An attribute of Shardy's, over the module's one mesh: `#sdy.sharding<@mesh, [{"fsdp"}, {}]>`."""
    entries = []
    for entry in sharding:
        names = (entry,) if isinstance(entry, str) else entry or ()
        entries.append("{" + ", ".join(f'"{name}"' for name in names) + "}")
    return f"#sdy.sharding<@mesh, [{', '.join(entries)}]>"


class Emitter:
    """The lines of a module so far. Names are unique in it, so that a region can use the values around it.

    num_devices: how many the program runs on, for the collectives.
    """

    def __init__(self, num_devices: int = 1) -> None:
        self.num_devices = num_devices
        self.lines: list[str] = []
        self.functions: dict[str, str] = {}
        self._count = 0

    def inline(self, graph: Graph, arguments: Sequence[Value]) -> list[Value]:
        """Writes a graph's operations with `arguments` as its parameters; returns its outputs."""
        raise NotImplementedError

    def fresh(self) -> str:
        """A new name."""
        self._count += 1
        return f"%{self._count}"

    def op(self, name: str, operands: Sequence[Value], shape: Shape, attributes: str = "", region: str = "") -> Value:
        """One operation with one result; `name` without the dialect for StableHLO's."""
        self._count += 1
        result = f"%{self._count}"
        self.lines.append(f"{result} = {_call(name, operands, attributes, region)} -> {tensor(shape)}")
        return Value(result, shape)

    def ops(
        self,
        name: str,
        operands: Sequence[Value],
        shapes: Sequence[Shape],
        attributes: str = "",
        region: str = "",
    ) -> tuple[Value, ...]:
        """One operation with any number of results."""
        head = self.fresh()
        given = f"{head}:{len(shapes)} = " if len(shapes) > 1 else f"{head} = " if shapes else ""
        types = ", ".join(map(tensor, shapes))
        self.lines.append(f"{given}{_call(name, operands, attributes, region)} -> ({types})")
        if len(shapes) == 1:
            return (Value(head, shapes[0]),)
        return tuple(Value(f"{head}#{number}", shape) for number, shape in enumerate(shapes))

    def region(
        self, shapes: Sequence[Shape], write: Callable[..., Sequence[Value]], returns: str = "stablehlo.return"
    ) -> str:
        """A region with arguments of `shapes`; `write` takes them and returns the region's results."""
        arguments = [Value(self.fresh(), shape) for shape in shapes]
        outside, self.lines = self.lines, []
        results = write(*arguments)
        inside, self.lines = self.lines, outside
        head = f"^bb0({', '.join(f'{value.name}: {tensor(value.shape)}' for value in arguments)}):" if shapes else ""
        names, types = ", ".join(r.name for r in results), ", ".join(tensor(r.shape) for r in results)
        return "\n".join(["{", *([head] if head else []), *inside, f'"{returns}"({names}) : ({types}) -> ()', "}"])

    def unary(self, name: str, x: Value) -> Value:
        """An operation whose result has its operand's shape and type."""
        return self.op(name, (x,), x.shape)

    def binary(self, name: str, x0: Value, x1: Value) -> Value:
        """An operation whose operands and result have one shape and type."""
        return self.op(name, (x0, x1), x0.shape)

    def compare(self, direction: str, x0: Value, x1: Value, kind: str = "") -> Value:
        """bool: EQ, NE, LT, LE, GT or GE; `kind` TOTALORDER orders floats by their bits."""
        attributes = f"comparison_direction = #stablehlo<comparison_direction {direction}>"
        if kind:
            attributes += f", compare_type = #stablehlo<comparison_type {kind}>"
        return self.op("compare", (x0, x1), x0.shape.with_dtype(DType.BOOL), attributes)

    def select(self, condition: Value, on_true: Value, on_false: Value) -> Value:
        """Elementwise; all have one shape."""
        return self.op("select", (condition, on_true, on_false), on_true.shape)

    def convert(self, x: Value, dtype: DType) -> Value:
        """XLA's own conversion; x itself if it has the type already."""
        return x if x.dtype is dtype else self.op("convert", (x,), x.shape.with_dtype(dtype))

    def bits(self, x: Value, shape: Shape) -> Value:
        """The bits of x read as another type."""
        return self.op("bitcast_convert", (x,), shape)

    def reshape(self, x: Value, *dimensions: int) -> Value:
        """x with other dimensions, its elements in the same order."""
        return x if x.dimensions == dimensions else self.op("reshape", (x,), Shape(x.dtype, dimensions))

    def broadcast(self, x: Value, dimensions: tuple[int, ...], axes: Sequence[int] | None = None) -> Value:
        """x broadcast to `dimensions`; axis i of x becomes `axes[i]`, by default i."""
        if x.dimensions == dimensions:
            return x
        axes = range(x.rank) if axes is None else axes
        return self.op(
            "broadcast_in_dim", (x,), Shape(x.dtype, dimensions), f"broadcast_dimensions = {int_array(axes)}"
        )

    def together(self, *values: Value) -> list[Value]:
        """The operands of an elementwise operation, broadcast to one shape."""
        first = values[0].dimensions
        if all(value.dimensions == first for value in values):
            return list(values)
        ranked = [value.dimensions for value in values if value.dimensions]
        dimensions = tuple(next((s for s in sizes if s != 1), 1) for sizes in zip(*ranked, strict=True))
        return [self.broadcast(value, dimensions) for value in values]

    def iota(self, shape: Shape, axis: int) -> Value:
        """Counts from 0 along `axis`."""
        return self.op("iota", (), shape, f"iota_dimension = {axis} : i64")

    def full(self, number: float, shape: Shape) -> Value:
        """A tensor filled with `number`."""
        scalar = self.op(
            "constant",
            (),
            Shape(shape.dtype),
            f"value = dense<{_scalar(number, shape.dtype)}> : {tensor(Shape(shape.dtype))}",
        )
        return self.broadcast(scalar, shape.dimensions)

    def like(self, x: Value, number: float) -> Value:
        """`number` in the shape of x."""
        return self.full(number, x.shape)

    def scalar(self, number: float, dtype: DType) -> Value:
        """`number` as a scalar."""
        return self.full(number, Shape(dtype))

    def slice(
        self, x: Value, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int] | None = None
    ) -> Value:
        """The elements from `starts` to `limits`."""
        steps = (1,) * x.rank if strides is None else strides
        sizes = tuple(-(-(limit - start) // step) for start, limit, step in zip(starts, limits, steps, strict=True))
        return self.op(
            "slice",
            (x,),
            Shape(x.dtype, sizes),
            f"start_indices = {int_array(starts)}, limit_indices = {int_array(limits)}, strides = {int_array(steps)}",
        )

    def reduce(self, name: str, x: Value, start: float, axes: Sequence[int]) -> Value:
        """x reduced by the operation `name` over `axes`, dropping them."""
        kept = tuple(size for axis, size in enumerate(x.dimensions) if axis not in axes)
        region = self.region([Shape(x.dtype)] * 2, lambda a, b: [self.binary(name, a, b)])
        operands = (x, self.scalar(start, x.dtype))
        return self.op("reduce", operands, Shape(x.dtype, kept), f"dimensions = {int_array(axes)}", region)


def _call(name: str, operands: Sequence[Value], attributes: str, region: str) -> str:
    names = ", ".join([value[0] for value in operands])
    types = ", ".join([tensor(value[1]) for value in operands])
    full = name if "." in name else f"stablehlo.{name}"
    middle = f"({region})" if region else ""
    return f'"{full}"({names}){middle}{f" {{{attributes}}}" if attributes else ""} : ({types})'


def _scalar(number: float, dtype: DType) -> str:
    if dtype is DType.BOOL:
        return "true" if number else "false"
    if dtype.is_integer:
        return str(int(number))
    part = dtype.real
    bits = np.array(number, part.numpy).tobytes()[::-1].hex().upper()
    return f"(0x{bits}, 0x{'0' * len(bits)})" if dtype.is_complex else f"0x{bits}"
