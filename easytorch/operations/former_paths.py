"""Aliases for the modules' paths before `dispatch/` and `attention/` existed: `easytorch.operations.base`, ...

Code that imports them keeps working, and so do their pickles. New code imports `easytorch.operations.dispatch.base`.
"""

import importlib
import sys

_DISPATCH = ("base", "check", "environment", "impl", "metadata", "output", "platform", "registry", "table")
_ATTENTION = (
    "blocksparse", "decode", "flash", "multi_latent", "ragged_page", "ragged_page_multi_latent", "ring", "ring_mesh",
    "sdpa", "vanilla",
)  # fmt: skip
_OPERATIONS = "easytorch.operations"

MOVED = {
    **{name: f"dispatch.{name}" for name in _DISPATCH},
    **{name: f"attention.{name}" for name in _ATTENTION},
    "attention_cpu": "attention.cpu_order",
    "attention_impl": "attention.impl",
}  # fmt: skip


def keep_former_paths() -> None:
    for former, path in MOVED.items():
        module = importlib.import_module(f"{_OPERATIONS}.{path}")
        sys.modules[f"{_OPERATIONS}.{former}"] = module
        setattr(sys.modules[_OPERATIONS], former, module)
