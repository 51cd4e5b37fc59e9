"""The global norm of plain and sharded gradients, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The global norm of the gradients, over all shards of DTensors: the same on each rank of their mesh."""
    norms = [torch.nn.utils.get_total_norm(group) for group in _by_mesh(gradients)]
    full = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return full[0] if len(full) == 1 else torch.linalg.vector_norm(torch.stack(full)) if full else torch.zeros(())


def clip(parameters: Sequence[torch.nn.Parameter], largest: float, norm: Tensor) -> None:
    """Scale the gradients so that their norm, which is `norm`, is at most `largest`."""
    of_gradient = {id(one.grad): one for one in parameters if one.grad is not None}
    for group in _by_mesh(one.grad for one in parameters if one.grad is not None):
        torch.nn.utils.clip_grads_with_norm_([of_gradient[id(gradient)] for gradient in group], largest, norm)


def _by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups for torch's foreach functions, which take DTensors of one mesh, or plain tensors."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())
