"""Whether a call is traced, transformed or intercepted before it reaches ATen.

`torch.func`'s transforms take no gradient of a custom operator (torch 2.13). A traced call has no numbers to look at.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

# Bound once: reading such an attribute takes three times as long as the call, at each layer of each token.
_transforms, _modes, _tracing_state = (
    torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state,
)  # fmt: skip
_autocasts = torch._C._is_any_autocast_enabled

REFUSAL = "torch.func takes no gradient of an operator: the definition, in plain torch, is transformed instead"


def transforming() -> bool:
    """True inside `torch.func.grad`, `vmap` and the like, also where they stand in a function that is compiled."""
    return torch._C._are_functorch_transforms_active()


def transforming_in_graph() -> bool:
    """True inside `torch.func` in a function that is compiled, where torch (2.13) follows no `autograd.Function`."""
    return torch.compiler.is_compiling() and transforming()


def eager() -> bool:
    """True where a call runs eagerly on real data: nothing traces, transforms or intercepts it."""
    return not (is_compiling() or _transforms() or _modes())


def untraced() -> bool:
    """`eager`, and `torch.jit.trace` does not record the call either."""
    return not (is_compiling() or _transforms() or _modes() or _tracing_state() is not None)


def as_given() -> bool:
    """`untraced`, and neither autocast on the CPU nor forward-mode gradients change what an operator would be given."""
    return not (
        is_compiling()
        or _transforms()
        or _modes()
        or _tracing_state() is not None
        or (_autocasts() and torch.is_autocast_enabled("cpu"))
        or forward_ad._current_level >= 0
    )


def recording(*tensors: torch.Tensor | None) -> bool:
    """True where autograd records what is computed from any of these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
