"""The gradient of an operator by recomputing it in a differentiable form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def gradients(
    function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[Any], output_grads: Sequence[torch.Tensor],
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:  # fmt: skip
    """The gradient of each of `inputs` that is needed, None for the others, of `function(*inputs)`."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() if need else x for x, need in zip(inputs, needed, strict=True)]
        outputs = function(*leaves)
    wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
    upstream = [grad.to(output.dtype) for grad, output in zip(output_grads, outputs, strict=True)]
    found = iter(torch.autograd.grad(outputs, wanted, upstream))
    return [next(found) if need else None for need in needed]
