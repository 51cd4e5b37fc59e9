"""Backends: computations built operation by operation and run on XLA, torch or NumPy (GoMLX's package backends).

registry.py        names, configuration strings, the environment variable
interface.py       `Backend`, its data interface, `Executable`
builder.py         `Builder`; its operations are in builder_ops/<family>.py
graph.py           what a builder records; shapeinference/ infers the shapes
xla/, aten/, reference/, notimplemented.py     the backends: backend.py and ops/<family>.py
"""

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType
from easytorch.backends.errors import BackendError, OpNotImplementedError
from easytorch.backends.graph import Op
from easytorch.backends.interface import Backend, Buffer, DataInterface, Executable
from easytorch.backends.registry import CONFIG_ENV_VAR, Constructor, choose, list, new_with_config, register
from easytorch.backends.shapes import Shape, make_shape
from easytorch.backends.types import (
    Capabilities,
    ConvolveAxesConfig,
    DeviceNum,
    FFTType,
    OpType,
    PadAxis,
    ReduceOpType,
    fft_type_string,
    fft_type_strings,
    fft_type_values,
    op_type_string,
    op_type_strings,
    op_type_values,
    reduce_op_type_string,
    reduce_op_type_strings,
    reduce_op_type_values,
)

# The default of `new()` without the environment variable; may be assigned.
DEFAULT_CONFIG = "xla"


def new(config: str | None = None) -> Backend:
    """The backend of `"<name>:<its own configuration>"`, or of the name alone.

    Without `config`: that of $EASYTORCH_BACKEND, else `backends.DEFAULT_CONFIG`, else the first that is registered.
    `BackendError` listing the known ones for an unknown name.
    """
    return choose(config, DEFAULT_CONFIG)


def must_new() -> Backend:
    """`new()`: in Python both raise."""
    return new()


def new_or_err() -> Backend:
    """`new()`, under GoMLX's deprecated name."""
    return new()


__all__ = [
    "CONFIG_ENV_VAR",
    "DEFAULT_CONFIG",
    "Backend",
    "BackendError",
    "Buffer",
    "Builder",
    "Capabilities",
    "Constructor",
    "ConvolveAxesConfig",
    "DType",
    "DataInterface",
    "DeviceNum",
    "Executable",
    "FFTType",
    "Op",
    "OpNotImplementedError",
    "OpType",
    "PadAxis",
    "ReduceOpType",
    "Shape",
    "fft_type_string",
    "fft_type_strings",
    "fft_type_values",
    "list",
    "make_shape",
    "must_new",
    "new",
    "new_or_err",
    "new_with_config",
    "op_type_string",
    "op_type_strings",
    "op_type_values",
    "reduce_op_type_string",
    "reduce_op_type_strings",
    "reduce_op_type_values",
    "register",
]
