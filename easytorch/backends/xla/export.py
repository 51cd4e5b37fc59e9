"""Modules through the classes of `jax.export`: run by `jax.jit`, or lowered for platforms that are not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax import export

from easytorch.backends.errors import BackendError
from easytorch.backends.graph import Graph
from easytorch.backends.shapes import Shape
from easytorch.backends.xla import pjrt
from easytorch.backends.xla.stablehlo import emit

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def lower(graph: Graph, platform: str) -> bytes:
    """Lowers the finished graph of a builder for one device of a platform, which this machine need not have.

    The bytes are a `jax.export.Exported`: `jax.export.deserialize(data).call(*arrays)` runs it there and gives the list
    of outputs. `BackendError` for an unknown platform.
    """
    return bytes(exported(graph, platform).serialize())


def exported(graph: Graph, platform: str) -> export.Exported:
    """`lower` before it is serialized."""
    if platform not in PLATFORMS:
        raise BackendError(f"no platform is called {platform!r}; known: {', '.join(PLATFORMS)}")
    if not graph.outputs:
        raise BackendError(f"{graph.name!r} has no outputs; compile it first")
    outputs = [(shape.dimensions, shape.dtype.numpy) for shape in graph.output_shapes]

    def frame(*arrays: jax.Array) -> list[jax.Array]:
        return [jax.numpy.zeros(*output) for output in outputs]

    # jax describes a function of such arguments and results; its body is replaced by our module.
    with pjrt.x64():
        described = export.export(jax.jit(frame, keep_unused=True), platforms=[platform])(
            *_structs(graph.parameter_shapes)
        )
    return dataclasses.replace(
        described, fun_name=graph.name, mlir_module_serialized=pjrt.portable_artifact(emit(graph))
    )


def jit_caller(graph: Graph, donated: Collection[int], device: Any) -> Callable[[list[Any]], list[Any]]:
    """A function of a list of arrays that `jax.jit` has compiled for the device."""
    platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    function = exported(graph, platform).call
    structs = _structs(graph.parameter_shapes, pjrt.sharding(device))
    with pjrt.x64():
        jitted = jax.jit(function, donate_argnums=tuple(donated), keep_unused=True)
        # Compiled on the first call where elements have four bits: a program compiled before it is called refuses the
        # layout that such arrays have.
        packed = any(shape.dtype.bits < 8 for shape in graph.parameter_shapes)
        compiled = jitted if packed else jitted.lower(*structs).compile()

    def call(arrays: list[Any]) -> list[Any]:
        with pjrt.x64():
            return list(compiled(*arrays))

    return call


def _structs(shapes: Collection[Shape], sharding: Any = None) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape.dimensions, shape.dtype.numpy, sharding=sharding) for shape in shapes]
