"""Gradients of an operator in C++ that are to be differentiated again: the definition's, recorded by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def by_definition(
    definition: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor | None], needed: Sequence[bool],
    grad: Tensor | tuple[Tensor | None, ...],
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of `definition(*inputs)` for each of `inputs` that is needed, else None; grad: of its output, or of
    each of its outputs, None of one that nothing reads."""
    with torch.enable_grad():
        outputs = definition(*inputs)
        outputs, grads = ((outputs,), (grad,)) if isinstance(outputs, Tensor) else (outputs, tuple(grad))
        read = [(output, one) for output, one in zip(outputs, grads, strict=True) if one is not None]
        pairs = zip(inputs, needed, strict=True)
        wanted = [tensor for tensor, need in pairs if need and tensor is not None]
        roots, upstream = zip(*read, strict=True)
        found = iter(torch.autograd.grad(roots, wanted, upstream, create_graph=True, materialize_grads=True))
    return [next(found) if need and tensor is not None else None for tensor, need in zip(inputs, needed, strict=True)]
