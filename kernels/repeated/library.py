"""The extension of Python, loaded with the kernels' library: what is compiled at first use is compiled at once."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from easytorch.kernels.cpu.build import BuildError, built, switched_off
from easytorch.kernels.repeated import build
from easytorch.kernels.repeated.steps import RESULT, Given

logger = logging.getLogger(__name__)

_module: Any = None
_reason: str | None = None  # why it could not be loaded


def module() -> Any:
    """The extension, or None where it is not loaded."""
    return _module


def load() -> None:
    """Loads the extension, which is built unless it is there; where that fails, repeated calls are found in Python."""
    global _module, _reason
    try:
        _module = _prepared(build.build())
        _reason = None
    except BuildError as error:
        _module, _reason = None, str(error)
        logger.info("repeated calls: %s; they are found in Python", error)


def described() -> str:
    """Its state in one line; builds nothing."""
    if _module is not None:
        return f"found in C++: {_module.__file__}"
    reason = _reason or switched_off() or build.refusal()
    if reason is not None:
        return f"found in Python: {reason}"
    return f"built: {build.path()}" if built(build.path()) else "not built yet: compiled with the C++ kernels"


def switches() -> tuple[dict[str, Any], str, dict[str, Any], str, int]:
    """Where torch keeps whether it compiles, and the level of forward mode, with its value outside of it."""
    return vars(torch.compiler), "_is_compiling_flag", vars(forward_ad), "_current_level", -1


def _prepared(path: Path) -> Any:
    """The module of that file, which knows where torch keeps what it asks for."""
    loader = importlib.machinery.ExtensionFileLoader(build.NAME, str(path))
    spec = importlib.machinery.ModuleSpec(build.NAME, loader, origin=str(path))
    spec.has_location = True
    try:
        made = importlib.util.module_from_spec(spec)
        loader.exec_module(made)
    except (ImportError, OSError) as error:
        raise BuildError(f"{path} does not load ({error}); remove it to have it built again") from error
    _tell(made)
    return made


def _tell(made: Any) -> None:
    tensor, parameter = torch.empty(1), torch.nn.Parameter(torch.empty(1))
    if not made.set_tensors(tensor, tensor._cdata, parameter, parameter._cdata):
        raise BuildError("this torch lays out a tensor of Python otherwise")
    compiling, flag, levels, level, outside = switches()
    if compiling.get(flag) is not False or levels.get(level) != outside:
        raise BuildError("this torch says otherwise whether it compiles, and at which level of forward mode it is")
    made.set_marks(RESULT, Given)
