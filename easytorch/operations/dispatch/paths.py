"""`forward_*` methods from a table, platform -> backend: in every folder a kernel's file is named after its backend.

`paths = {"cpu": "aten", "gpu": "triton"}` of the operation `rms_norm` gives it a `forward_cpu` that runs
kernels/rms_norm/aten.py, and a `forward_gpu` that runs triton_op.py beside it. "cpp": "cpu" adds `forward_cpp`, the
operator in C++ that runs where the class's `prefers_cpp` says so. `functions = {"aten": "aten_op.attention"}` names a
function that is not the operation's in that file. A method that a class defines itself overrides the table's.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from easytorch.operations.dispatch.platform import PLATFORMS

# backend -> the file of its kernels (docs/add-an-operation.md)
FILES = {
    "aten": "aten", "cpu": "cpu", "onednn": "onednn", "triton": "triton_op", "xla": "torch_xla_op",
    "pallas": "torch_xla_op",
}  # fmt: skip

_EVERYWHERE = frozenset({"aten", "cpu", "onednn"})  # they import torch alone

# Source text, as `dataclasses` makes its methods: Dynamo traces an import statement and breaks the graph at
# `importlib.import_module`, and importing every kernel's operators at once would add a tenth to the start.
_LAZY = """\
def {method}(self, *args, **kwargs):
    from easytorch.kernels.{folder} import {file}

    return self.run({file}.{function}, *args, **kwargs)
"""


def place_of(backend: str, name: str, functions: Mapping[str, str]) -> tuple[str, str]:
    """The file, without .py, and the function in it that computes the operation `name` by `backend`."""
    file, _, function = functions.get(backend, f"{FILES[backend]}.{name}").partition(".")
    return file, function


def _kernel(name: str, folder: str, file: str, function: str) -> Callable[..., Any]:
    where = f"easytorch.kernels.{folder}.{file}"
    found: Callable[..., Any] | None = None
    try:
        found = getattr(import_module(where), function, None)
    except ModuleNotFoundError as error:
        if not where.startswith(str(error.name)):  # the kernel's file is there, and a package that it imports is not
            raise
    if found is None:
        raise ValueError(
            f"{name}: paths names {function} of {where}, which is not there; set `folder` and `functions`, or write "
            f"the method forward_<platform>"
        )
    return found


def path(platform: str, backend: str, folder: str, name: str, functions: Mapping[str, str]) -> Callable[..., Any]:
    """`forward_<platform>`: `self.run(kernel, *args, **kwargs)` for a function of kernels/`folder`/, by `backend`."""
    if platform not in (known := (*PLATFORMS, "gpu", "cpp")):
        raise ValueError(f"paths: {platform} is no platform; known are {', '.join(known)}")
    if backend not in FILES:
        raise ValueError(f"paths: {platform} has the backend {backend!r}; known are {', '.join(FILES)}")
    method = f"forward_{platform}"
    file, function = place_of(backend, name, functions)
    if backend in _EVERYWHERE:  # imported with the operation, since every process may run it: no import at a call
        kernel = _kernel(name, folder, file, function)

        def made(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.run(kernel, *args, **kwargs)

    else:
        source = _LAZY.format(method=method, folder=folder, file=file, function=function)
        shown = f"<{method} of {name}>"
        linecache.cache[shown] = len(source), None, source.splitlines(keepends=True), shown  # for tracebacks
        namespace: dict[str, Any] = {}
        exec(compile(source, shown, "exec"), namespace)
        made = namespace[method]
    made.__name__ = method
    made.backend = backend  # type: ignore[attr-defined]
    return made
