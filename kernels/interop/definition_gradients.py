"""Gradients of an operator in C++ that are to be differentiated again: the definition's, recorded by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def by_definition(
    definition: Callable[..., Tensor], inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of `definition(*inputs)` for each of `inputs` that is needed, else None; grad: of its output."""
    with torch.enable_grad():
        output = definition(*inputs)
        pairs = zip(inputs, needed, strict=True)
        wanted = [tensor for tensor, need in pairs if need and tensor is not None]
        found = iter(torch.autograd.grad(output, wanted, grad, create_graph=True))
    return [next(found) if need and tensor is not None else None for tensor, need in zip(inputs, needed, strict=True)]
