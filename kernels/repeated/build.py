"""Compiles the extension of Python: one file, in a few seconds, for this Python and torch, kept beside the kernels'
library (`cpu/build.py`)."""

from __future__ import annotations

import functools
import platform
import sys
import sysconfig
from pathlib import Path

import torch

from easytorch.kernels.cpu import build as kernels

NAME = "easytorch_repeated"
SOURCE = kernels.SOURCES / "repeated" / "module.cpp"
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python")


def refusal() -> str | None:
    """None where the extension is there or can be built here, else the reason."""
    if (reason := kernels.refusal()) is not None:
        return reason
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it is made for CPython with its lock"
    if not (headers() / "Python.h").is_file() and not kernels.built(path()):
        return f"Python.h is not in {headers()}: install Python's headers (python3-dev)"
    return None


def headers() -> Path:
    """The folder of Python's headers."""
    return Path(sysconfig.get_path("include"))


def path() -> Path:
    """The path of the extension."""
    kept = kernels.folder()
    assert kept is not None, "refusal() says so"
    return kernels.library_in(kept.with_name("repeated"), _key(kernels._flags(), torch.__version__))


def build() -> Path:
    """The path of the extension, which is compiled unless it is there; `BuildError` where that fails."""
    if (reason := refusal()) is not None:
        raise kernels.BuildError(reason)
    return kernels.build_into(path(), _compile)


def _compile(work: Path) -> Path:
    """The extension, in the folder `work`."""
    tool = kernels.compiler()
    assert tool is not None, "refusal() says so"
    made, root = work / "module.so", Path(torch.__file__).parent
    includes = ("-isystem", str(root / "include"), "-isystem", str(headers()))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    shared = ("-shared", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared",)
    paths = (str(SOURCE), "-o", str(made), f"-L{root / 'lib'}")
    kernels._run([*tool, *kernels._flags(), abi, *includes, *shared, *paths, *LIBRARIES])
    return made


@functools.cache
def _key(flags: tuple[str, ...], torch_version: str) -> str:
    python = sysconfig.get_config_var("EXT_SUFFIX"), sys.version_info[:2]
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    return kernels.key_of(sources, flags, torch_version, platform.machine(), *python)


if __name__ == "__main__":
    print(refusal() or build())
