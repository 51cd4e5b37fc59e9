"""`Context`, a lowering's first argument, with what ATen does implicitly and a builder does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.frontend.errors import LoweringError
from easytorch.frontend.promotion import result_type
from easytorch.frontend.rng import RandomState

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

# The lowered form of a value of the torch graph.
Value = Any


class Context:
    """One computation while it is lowered. `node` is the node of the torch graph being lowered; of its
    `meta["val"]` only the dtype and the rank are sure: sizes may be symbols there, and are plain ints in shapes of ops.
    """

    def __init__(self, builder: Builder, inline: Callable[..., Any]) -> None:
        self.builder = builder
        self.node: Node | None = None
        self._inline = inline
        self._scalars: dict[tuple[DType, bytes], Op] = {}
        self.random = RandomState(builder)

    # --- other graphs

    def inline(self, graph: GraphModule, *arguments: Value) -> Any:
        """The outputs of the submodule `graph` for `arguments`, as part of this computation."""
        return self._inline(graph, self, arguments)

    def closure(self, graph: GraphModule, *captured: Value) -> Callable[..., tuple[Op, ...]]:
        """`graph` as a closure for the builder: its parameters come first, then `captured`."""

        def function(builder: Builder, *parameters: Op) -> tuple[Op, ...]:
            results = self._inline(graph, self.within(builder), (*parameters, *captured))
            return tuple(results) if isinstance(results, tuple | list) else (results,)

        return function

    def within(self, builder: Builder) -> Context:
        """The context of a closure that `builder` records."""
        return Context(builder, self._inline)

    # --- constants

    def scalar(self, value: Any, dtype: Any) -> Op:
        """A constant without axes; integers wrap around as ATen's do."""
        kind = dtype_of(dtype)
        array = np.array(value)
        if array.dtype == object or (kind.is_integer and array.dtype.kind in "iu"):
            array = np.array(int(value) & 0xFFFFFFFFFFFFFFFF, np.uint64)
        with np.errstate(all="ignore"):
            array = array.astype(kind.numpy)
        key = (kind, array.tobytes())
        if key not in self._scalars:
            self._scalars[key] = self.builder.constant(array)
        return self._scalars[key]

    def constant(self, tensor: torch.Tensor | np.ndarray) -> Op:
        """The values of a tensor, as a constant of the program."""
        return self.builder.constant(as_numpy(tensor) if isinstance(tensor, torch.Tensor) else tensor)

    def full(self, dimensions: Sequence[int], value: Any, dtype: Any) -> Op:
        """`dimensions` filled with a number, or with an op without axes."""
        scalar = self.cast(value, dtype) if isinstance(value, Op) else self.scalar(value, dtype)
        return self.expand(scalar, dimensions)

    def iota(self, dimensions: Sequence[int], axis: int, dtype: Any) -> Op:
        """Counts from 0 along `axis`."""
        return self.builder.iota(Shape(dtype_of(dtype), tuple(dimensions)), axis)

    def random_bits(self, dimensions: Sequence[int], dtype: Any) -> Op:
        """Random bits of an unsigned integer type, different at each call (rng.py)."""
        return self.random.bits(tuple(dimensions), dtype)

    # --- types

    def dtype(self) -> DType:
        """ATen's dtype of the (first) output."""
        value = self.node.meta["val"] if self.node is not None else None
        first = value[0] if isinstance(value, tuple | list) else value
        if not isinstance(first, torch.Tensor):
            raise LoweringError(f"{self.node}: the graph does not say the dtype of its output")
        return dtype_of(first.dtype)

    def promote(self, *values: Value) -> DType:
        """The type that ATen promotes tensors and Python numbers to."""
        return result_type(*values)

    def floating(self, dtype: DType) -> DType:
        """`dtype`, or torch's default float for integers and bool: the type in which ATen divides, takes roots, ..."""
        return dtype if dtype.is_float or dtype.is_complex else dtype_of(torch.get_default_dtype())

    def cast(self, x: Value, dtype: Any) -> Op:
        """x (an op or a number) as `dtype`."""
        kind = dtype_of(dtype)
        if not isinstance(x, Op):
            return self.scalar(x, kind)
        if x.shape.dtype is kind:
            return x
        if x.shape.dtype.is_complex and not kind.is_complex and kind is not DType.BOOL:
            x = self.builder.real(x)
        return x if x.shape.dtype is kind else self.builder.convert_dtype(x, kind)

    def wide(self, x: Op) -> Op:
        """x in the type ATen computes and accumulates in: float32 for narrower floats, x itself otherwise."""
        narrow = x.shape.dtype.is_float and x.shape.dtype.size < 4
        return self.builder.convert_dtype(x, DType.FLOAT32) if narrow else x

    def operands(self, *values: Value, dtype: Any = None) -> list[Op]:
        """`values` of one type (that of `dtype`, else promoted) and, but for scalars, of one rank: what elementwise
        operations of the builder take."""
        kind = self.promote(*values) if dtype is None else dtype_of(dtype)
        return self.align(*(self.cast(value, kind) for value in values))

    def align(self, *ops: Op) -> list[Op]:
        """`ops` of one rank, by leading axes of size one; scalars stay as they are."""
        rank = max(op.shape.rank for op in ops)
        return [
            op
            if op.shape.rank in (0, rank)
            else self.builder.reshape(op, (1,) * (rank - op.shape.rank) + op.shape.dimensions)
            for op in ops
        ]

    # --- shapes

    def axis(self, axis: int, rank: int) -> int:
        """A negative axis counted from the end; a scalar has one axis for this purpose."""
        size = max(rank, 1)
        if not -size <= axis < size:
            raise LoweringError(f"axis {axis} is not in [{-size}, {size})")
        return axis % size

    def axes(self, axes: int | Iterable[int] | None, rank: int) -> tuple[int, ...]:
        """Sorted axes; all of them for None and for none given, as ATen's reductions take it."""
        if axes is None:
            return tuple(range(rank))
        given = (axes,) if isinstance(axes, int) else tuple(axes)
        if not given:
            return tuple(range(rank))
        return tuple(sorted({self.axis(axis, rank) for axis in given})) if rank else ()

    def broadcast_dims(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        """The dimensions that all broadcast to, as numpy's and torch's rule."""
        return tuple(np.broadcast_shapes(*(tuple(shape) for shape in shapes)))

    def expand(self, x: Op, dimensions: Sequence[int]) -> Op:
        """x repeated to `dimensions`; its own axes are the last ones."""
        wanted = tuple(dimensions)
        if x.shape.dimensions == wanted:
            return x
        first = len(wanted) - x.shape.rank
        axes = range(first, len(wanted))
        return self.builder.broadcast_in_dim(x, Shape(x.shape.dtype, wanted), tuple(axes))

    def reshape(self, x: Op, dimensions: Sequence[int]) -> Op:
        """x under other dimensions; one of them may be -1."""
        wanted = list(dimensions)
        if -1 in wanted:
            place = wanted.index(-1)
            rest = int(np.prod([size for size in wanted if size != -1], dtype=np.int64))
            wanted[place] = x.shape.size // rest if rest else 0
        return x if tuple(wanted) == x.shape.dimensions else self.builder.reshape(x, tuple(wanted))

    def transpose(self, x: Op, permutation: Sequence[int]) -> Op:
        """Axis i of the output is axis `permutation[i]` of x."""
        order = tuple(permutation)
        return x if order == tuple(range(x.shape.rank)) else self.builder.transpose(x, order)

    # --- reductions

    def reduce(self, method: Callable[..., Op], x: Op, axes: int | Iterable[int] | None, keepdim: bool = False) -> Op:
        """`method` (`ctx.builder.reduce_sum`, ...) over `axes`; `keepdim` leaves them with size one.

        A scalar is its own reduction.
        """
        over = self.axes(axes, x.shape.rank)
        if not over:
            return x
        reduced = method(x, over)
        return self.keep(reduced, x, over) if keepdim else reduced

    def keep(self, reduced: Op, x: Op, axes: Sequence[int]) -> Op:
        """`reduced` (x without `axes`) with those axes of size one."""
        sizes = [1 if axis in axes else size for axis, size in enumerate(x.shape.dimensions)]
        return self.reshape(reduced, sizes)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The values on the host; types that numpy lacks by way of their bits."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    kind = dtype_of(host.dtype).numpy
    if kind.isbuiltin == 1:
        return host.numpy()
    bits = {1: torch.uint8, 2: torch.int16}[kind.itemsize]
    return host.view(bits).numpy().view(kind)
