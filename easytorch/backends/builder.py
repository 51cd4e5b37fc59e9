"""`Builder`: records operations in a graph, checked and with their shapes, and hands it to its backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.backends.arguments import ints, text
from easytorch.backends.builder_ops.collectives import CollectivesOps
from easytorch.backends.builder_ops.control import ControlOps
from easytorch.backends.builder_ops.conversion import ConversionOps
from easytorch.backends.builder_ops.elementwise import ElementwiseOps
from easytorch.backends.builder_ops.indexing import IndexingOps
from easytorch.backends.builder_ops.movement import MovementOps
from easytorch.backends.builder_ops.normalization import NormalizationOps
from easytorch.backends.builder_ops.product import ProductOps
from easytorch.backends.builder_ops.random import RandomOps
from easytorch.backends.builder_ops.recorder import Closure
from easytorch.backends.builder_ops.reduction import ReductionOps
from easytorch.backends.builder_ops.sorting import SortingOps
from easytorch.backends.builder_ops.windows import WindowOps
from easytorch.backends.composites import decompose, is_composite
from easytorch.backends.dtypes import array_of, dtype_of
from easytorch.backends.errors import BackendError, OpNotImplementedError
from easytorch.backends.graph import Graph, Op
from easytorch.backends.partitioning import Mesh, check_sharding
from easytorch.backends.shapeinference import infer
from easytorch.backends.shapes import Shape, shape_of
from easytorch.backends.types import OpType

if TYPE_CHECKING:
    from easytorch.backends.interface import Backend, Executable


class Builder(
    ElementwiseOps,
    ConversionOps,
    MovementOps,
    IndexingOps,
    ReductionOps,
    WindowOps,
    ProductOps,
    NormalizationOps,
    RandomOps,
    SortingOps,
    ControlOps,
    CollectivesOps,
):
    """One computation of `backend`. Every method that adds an operation raises `BackendError` for operands that do not
    fit, and `OpNotImplementedError` for what the backend does not have."""

    def __init__(self, backend: Backend, name: str, num_devices: int = 1, parent: Builder | None = None) -> None:
        text(name, "the name of a computation")
        self.backend = backend
        self.num_devices = num_devices
        self.graph: Graph = Graph(name, None if parent is None else parent.graph)
        self._parent = parent
        self._closed = False
        self._parameter_names: set[str] = set()

    @property
    def name(self) -> str:
        return self.graph.name

    def op_shape(self, op: Op) -> Shape:
        """The shape of an operation's output; adds nothing."""
        return self._resolve(op, "op_shape").shape

    def distributed_auto_sharding(self, axes: Mapping[str, int]) -> None:
        """Divides the computation over a mesh, whose axes are given by name with their sizes.

        Operations are written for whole arrays. The program runs on the first devices of the backend at once, and its
        inputs and outputs are the parts that the devices have: all of device 0, then of device 1, ...
        `OpNotImplementedError` where the backend does not partition.
        """
        self._refuse_closed("DistributedAutoSharding")
        mesh = Mesh.of(axes)
        if not self.backend.partitions():
            raise OpNotImplementedError(
                f"DistributedAutoSharding: the backend {self.backend.name!r} does not partition; 'xla' does"
            )
        if self.graph.nodes or self._parent is not None or self.num_devices > 1:
            raise BackendError("DistributedAutoSharding: choose the mesh of a new builder, made for one device")
        if mesh.size > self.backend.num_devices():
            raise BackendError(
                f"DistributedAutoSharding: the mesh has {mesh.size} devices, and the backend "
                f"{self.backend.num_devices()}; for CPUs set XLA_FLAGS=--xla_force_host_platform_device_count="
                f"{mesh.size} before jax starts"
            )
        self.graph.mesh = mesh

    @property
    def partitioned(self) -> bool:
        """Whether the computation, or the one around this closure, is divided over a mesh."""
        return self.graph.mesh is not None or (self._parent is not None and self._parent.partitioned)

    def parameter(self, name: str, shape: Shape, sharding: Any = None) -> Op:
        """An input, fed in the order in which they are made.

        sharding: of a partitioned computation, mesh axes by dimension; None is replicated.
        """
        self._refuse_closed("Parameter")
        name, shape = text(name, "Parameter: the name"), shape_of(shape, "Parameter: the shape")
        if name in self._parameter_names:
            raise BackendError(f"Parameter: {self.name!r} has a parameter {name!r} already; choose another name")
        if (mesh := self._mesh(sharding, "Parameter")) is not None:
            self.graph.parameter_shardings.append(check_sharding(sharding, shape, mesh, f"Parameter {name!r}"))
        return self._parameter(name, shape)

    def with_sharding(self, x: Op, sharding: Any) -> Op:
        """x, divided over the mesh like this where it is computed."""
        x = self._resolve(x, "with_sharding")
        mesh = self._mesh(sharding, "with_sharding")
        if mesh is None:
            return self.identity(x)
        checked = check_sharding(sharding, x.shape, mesh, "with_sharding")
        return self._record(OpType.IDENTITY, (x,), {"sharding": checked}, (x.shape,))[0]

    def barrier(self, *xs: Op) -> tuple[Op, ...]:
        """`xs`, none of which is used before all are there, and which the compiler does not know to be what they were.

        It keeps a recomputation from being merged with the first one. Backends that merge nothing return `xs`.
        """
        xs = tuple(self._resolve(x, "barrier") for x in xs)
        if not self.backend.partitions() or not xs:
            return xs
        return self._record(OpType.IDENTITY, xs, {"barrier": True}, tuple(x.shape for x in xs))

    def constant(self, flat: Any, *dims: int | Sequence[int]) -> Op:
        """An array in the computation: the values `flat` under `dims`, by default the shape that numpy gives them.

        The values are copied. Large arrays are better parameters.
        """
        given = array_of(flat, "Constant")
        shape = Shape(dtype_of(given.dtype), ints(dims, "Constant: the dimensions") if dims else given.shape)
        if given.size != shape.size:
            raise BackendError(f"Constant: {given.size} values do not fill the dimensions {shape.dimensions}")
        array = np.array(given.reshape(shape.dimensions))
        array.setflags(write=False)
        return self._record(OpType.CONSTANT, (), {"value": array}, (shape,))[0]

    def compile(self, *outputs: Op, shardings: Sequence[Any] | None = None) -> Executable:
        """The program that computes `outputs`. The builder takes no further operations.

        shardings: of a partitioned computation, one an output; without them all are replicated.
        """
        self.finish(*outputs, shardings=shardings)
        return self.backend.compile_graph(self.graph, self.num_devices)

    def finish(self, *outputs: Op, shardings: Sequence[Any] | None = None) -> Graph:
        """The graph of `outputs`, not compiled. The builder takes no further operations."""
        self._refuse_closed("Compile")
        if self._parent is not None:
            raise BackendError("Compile: a closure is compiled with the computation around it")
        if not outputs:
            raise BackendError(f"Compile: {self.name!r} has no outputs; give at least one operation")
        self.graph.outputs = tuple(self._resolve(op, "Compile") for op in outputs)
        if (mesh := self._mesh(shardings, "Compile")) is not None:
            given = [None] * len(outputs) if shardings is None else list(shardings)
            if len(given) != len(outputs):
                raise BackendError(f"Compile: {len(given)} shardings for {len(outputs)} outputs")
            self.graph.output_shardings = tuple(
                check_sharding(one, op.shape, mesh, f"Compile: output {number}")
                for number, (one, op) in enumerate(zip(given, self.graph.outputs, strict=True))
            )
        self._closed = True
        return self.graph

    def _add_one(self, op_type: OpType, *operands: Any, **attributes: Any) -> Op:
        return self._add(op_type, *operands, **attributes)[0]

    def _add(self, op_type: OpType, *operands: Any, **attributes: Any) -> tuple[Op, ...]:
        inputs = tuple(self._resolve(operand, op_type.go_name) for operand in operands)
        shapes = infer(op_type, [op.shape for op in inputs], attributes, num_devices=self.num_devices)
        capabilities = self.backend.capabilities()
        dtype = (inputs[0].shape if inputs else shapes[0]).dtype
        if not capabilities.supports(op_type, dtype):
            if is_composite(op_type):
                return decompose(self, op_type, inputs, attributes)
            of = f" of {dtype}" if op_type in capabilities.operations else ""
            raise OpNotImplementedError(
                f"{op_type.go_name}: the backend {self.backend.name!r} has no such operation{of}"
            )
        return self._record(op_type, inputs, attributes, shapes)

    def _record(
        self, op_type: OpType, inputs: tuple[Op, ...], attributes: dict[str, Any], shapes: tuple[Shape, ...]
    ) -> tuple[Op, ...]:
        self._refuse_closed(op_type.go_name)
        if any(shape.dtype not in self.backend.capabilities().dtypes for shape in shapes):
            names = ", ".join(str(shape) for shape in shapes)
            raise OpNotImplementedError(f"{op_type.go_name}: the backend {self.backend.name!r} does not hold {names}")
        node = self.graph.add(op_type, inputs, attributes, shapes)
        return tuple(Op(node, output) for output in range(len(shapes)))

    def _parameter(self, name: str, shape: Shape) -> Op:
        (op,) = self._record(OpType.PARAMETER, (), {"name": name, "index": len(self.graph.parameters)}, (shape,))
        self.graph.parameters.append(op)
        self._parameter_names.add(name)
        return op

    def _closure(self, function: Closure, shapes: Sequence[Shape], name: str) -> Graph:
        if not callable(function):
            raise BackendError(f"{name}: a closure must be a function of a builder and operations, not {function!r}")
        inner = Builder(self.backend, f"{self.name}.{name}", self.num_devices, parent=self)
        result = function(inner, *(inner.parameter(f"x{number}", shape) for number, shape in enumerate(shapes)))
        outputs = result if isinstance(result, tuple | list) else (result,)
        inner.graph.outputs = tuple(inner._resolve(op, name) for op in outputs)
        inner._closed = True
        return inner.graph

    def _shapes(self, operands: Sequence[Op]) -> list[Shape]:
        return [self._resolve(op, "closure").shape for op in operands]

    def _resolve(self, op: Any, what: str) -> Op:
        """The operation in this graph that `op` is: itself, or, of a graph around this closure, its capture."""
        if not isinstance(op, Op):
            raise BackendError(f"{what}: {op!r} is no operation; make it one with `constant` or `parameter`")
        if op.node.graph is self.graph:
            return op
        if self._parent is None:
            raise BackendError(f"{what}: {op!r} belongs to another builder than {self.name!r}")
        outer = self._parent._resolve(op, what)
        if outer not in self.graph.captures:
            self.graph.captures[outer] = self._parameter(f"captured{len(self.graph.captures)}", outer.shape)
        return self.graph.captures[outer]

    def _mesh(self, sharding: Any, what: str) -> Mesh | None:
        mesh = self.graph.mesh
        if mesh is None and sharding is not None:
            raise BackendError(f"{what}: a sharding needs a mesh; call distributed_auto_sharding first")
        return mesh

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            raise BackendError(f"{what}: {self.name!r} is compiled already; make a new builder")
        if self.backend.is_finalized():
            raise BackendError(f"{what}: the backend {self.backend.name!r} is finalized; make a new one")
