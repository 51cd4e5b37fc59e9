"""Whether a call is traced, transformed or intercepted before it reaches ATen.

`torch.func`'s transforms take no gradient of a custom operator (torch 2.13). A traced call has no numbers to look at.
"""

from __future__ import annotations

import torch

REFUSAL = "torch.func takes no gradient of an operator: the definition, in plain torch, is transformed instead"


def transforming() -> bool:
    """True inside `torch.func.grad`, `vmap` and the like, also where they stand in a function that is compiled."""
    return torch._C._are_functorch_transforms_active()


def transforming_in_graph() -> bool:
    """True inside `torch.func` in a function that is compiled, where torch (2.13) follows no `autograd.Function`."""
    return torch.compiler.is_compiling() and transforming()


def eager() -> bool:
    """True where a call runs eagerly on real data: nothing traces, transforms or intercepts it."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    )


def recording(*tensors: torch.Tensor | None) -> bool:
    """True where autograd records what is computed from any of these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
