"""EasyTorch: torch models on TPU, GPU and CPU, one attention on every device, and weights both ways to JAX/Flax.

Public names load on first use, so `import easytorch` costs neither transformers nor jax (see docs/architecture.md).
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a checkout (tests, `python -m` at the root) the rooms `kernels/` and `bridge/` stand beside this package;
# installed, setuptools has already put them inside it.
_root = Path(__file__).resolve().parent.parent
if (_root / "setup.py").is_file():
    __path__.append(str(_root))

# After __path__: this is the first import of the package itself. It is as light as this file.
from easytorch import auto as _auto  # noqa: E402
from easytorch.bridge_names import name_functions as _name_functions  # noqa: E402
from easytorch.saved_programs import register_when_needed as _register_when_needed  # noqa: E402

_name_functions()
_register_when_needed()

_EXPORTS = {
    "easytorch.auto": (*_auto.MODELS, *_auto.PASSED_ON),
    "easytorch.operations": (
        "AttentionOutput",
        "BaseOperation",
        "OperationImpl",
        "OperationMetadata",
        "OperationOutput",
        "OperationRegistry",
    ),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

if TYPE_CHECKING:  # what type checkers see; tests/packaging/test_import.py holds it to _EXPORTS
    from easytorch.auto.declared import *  # noqa: F403
    from easytorch.operations import AttentionOutput as AttentionOutput
    from easytorch.operations import BaseOperation as BaseOperation
    from easytorch.operations import OperationImpl as OperationImpl
    from easytorch.operations import OperationMetadata as OperationMetadata
    from easytorch.operations import OperationOutput as OperationOutput
    from easytorch.operations import OperationRegistry as OperationRegistry


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _auto.offered(tuple(_HOME))
    home = _HOME.get(name, "easytorch.auto" if name.startswith("AutoModel") else None)
    if home is None:
        raise AttributeError(f"module 'easytorch' has no attribute {name!r}; it has {', '.join(_HOME)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
