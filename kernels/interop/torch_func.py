"""Whether a call is traced, transformed or intercepted before it reaches ATen.

`torch.func`'s transforms take no gradient of a custom operator (torch 2.13). A traced call has no numbers to look at.
"""

from __future__ import annotations

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

# Bound once: reading such an attribute takes three times as long as the call, at each layer of each token.
_transforms, _modes, _tracing_state = (
    torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state,
)  # fmt: skip
_autocasts = torch._C._is_any_autocast_enabled

REFUSAL = "torch.func takes no gradient of an operator: the definition, in plain torch, is transformed instead"


FORWARD_REFUSAL = "it has no forward-mode gradient, which an operator would drop: the definition, in plain torch, has"


def transforming() -> bool:
    """True inside `torch.func.grad`, `vmap` and the like, also where they stand in a function that is compiled, and
    in forward mode."""
    return (torch._C._are_functorch_transforms_active() and not _functionalizing()) or forward_mode()


def _functionalizing() -> bool:
    """True inside `torch.func.functionalize` alone, which takes operators and no `autograd.Function`."""
    if is_compiling():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return all(level.key() == torch._C._functorch.TransformType.Functionalize for level in levels)


def batched_by_autograd(grad: torch.Tensor) -> bool:
    """True for a gradient of several outputs at once, of `torch.autograd.grad(is_grads_batched=True)` and the
    vectorized `jacobian`: a vmap of its own, not one of `torch.func`'s, under which no operator that writes into its
    arguments runs."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(grad))


def forward_mode() -> bool:
    """True inside `forward_ad.dual_level`, `torch.func.jvp` and `jacfwd`, outside of graphs.

    A custom operator (torch 2.13) passes on no tangent there, without a word where no gradient is recorded.
    """
    return not is_compiling() and forward_ad._current_level >= 0


def without_numbers(*given: object) -> bool:
    """True where the tensors given have no numbers to look at: in a graph of torch.compile or export, and fake ones."""
    if is_compiling():
        return True
    faked = any(isinstance(one, FakeTensor) for one in given)
    return faked or (_modes() > 0 and detect_fake_mode() is not None)


def transforming_in_graph() -> bool:
    """True inside `torch.func` in a function that is compiled, where torch (2.13) follows no `autograd.Function`."""
    return torch.compiler.is_compiling() and transforming()


def eager() -> bool:
    """True where a call runs eagerly on real data: nothing traces, transforms or intercepts it."""
    return not (is_compiling() or _transforms() or _modes())


def untraced() -> bool:
    """`eager`, and `torch.jit.trace` does not record the call either."""
    return not (is_compiling() or _transforms() or _modes() or _tracing_state() is not None)


def as_given(dtype: torch.dtype | None = None, *, elementwise: bool = False) -> bool:
    """`untraced`, and neither autocast on the CPU nor forward-mode gradients change what an operator would be given.

    dtype: of the floating tensors that it is given, which autocast to the same one leaves as they are. elementwise: an
    operation whose steps autocast casts nothing for, such as norms.
    """
    return not (
        is_compiling()
        or _transforms()
        or _modes()
        or _tracing_state() is not None
        or (not elementwise and _autocasts() and autocast_from(dtype))
        or forward_ad._current_level >= 0
    )


def autocast_from(dtype: torch.dtype | None) -> bool:
    """Whether autocast on the CPU is enabled, to another dtype than this."""
    return torch.is_autocast_enabled("cpu") and dtype is not torch.get_autocast_dtype("cpu")


def recording(*tensors: torch.Tensor | None) -> bool:
    """True where autograd records what is computed from any of these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
