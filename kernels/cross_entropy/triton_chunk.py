"""`chunk.step` by the Triton kernels of cross entropy. Imports Triton."""

from __future__ import annotations

import torch

from easytorch.kernels.cross_entropy.chunk import Settings
from easytorch.kernels.cross_entropy.triton_calls import backward_call, forward_call


def step(
    logits: torch.Tensor, labels: torch.Tensor, losses_grad: torch.Tensor | None, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """logits (n, V), contiguous, which are overwritten by their gradient -> losses (n,) float32, and that gradient."""
    losses, lse = (
        torch.empty(*shape, *labels.shape, dtype=torch.float32, device=logits.device) for shape in ((), (2,))
    )
    forward_call(logits, labels, losses, lse, *settings).launch()
    if losses_grad is None:
        return losses, None
    backward_call(losses_grad, logits, labels, lse, logits, *settings).launch()
    return losses, logits
