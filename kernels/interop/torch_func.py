"""Whether a call runs under `torch.func`, whose transforms take no gradient of a custom operator (torch 2.13)."""

from __future__ import annotations

import torch

REFUSAL = "torch.func takes no gradient of an operator: the definition, in plain torch, is transformed instead"


def transforming() -> bool:
    """True inside `torch.func.grad`, `vmap` and the like; False while a graph is traced."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
