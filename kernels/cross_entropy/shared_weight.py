"""One weight as an embedding and as the head of a fused loss: the embedding's rows are added to the loss's gradient.

Of a tied weight autograd sums two gradients. The embedding's is as large as the weight, zeros but for the rows of the
tokens: written, added and freed at the end of the backward pass, where it was the peak of a step's memory. Here one
node gives both, and adds those rows to the loss's gradient in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.interop.torch_func import batched_by_autograd


def embedding_and_weight(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> tuple[Tensor, Tensor]:
    """ids (...), weight (V, D) -> `F.embedding` of them (..., D), and weight (V, D) for one call of
    `fused_linear_cross_entropy` and nothing else: its gradient is written to. Differentiable any number of times."""
    found: tuple[Tensor, Tensor] = _Shared.apply(weight, ids, -1 if padding_idx is None else padding_idx % len(weight))
    return found


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.classes, ctx.padding_idx = len(weight), padding_idx
        return F.embedding(ids, weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor | None, of_weight: Tensor | None) -> tuple[Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        if of_rows is None:
            return of_weight, None, None
        added_to = of_weight is not None and of_weight.is_contiguous() and of_weight.dtype is of_rows.dtype
        if not added_to or torch.is_grad_enabled() or batched_by_autograd(of_rows):
            dense = torch.ops.aten.embedding_backward(of_rows, ids, ctx.classes, ctx.padding_idx, False, False)
            return dense if of_weight is None else of_weight + dense, None, None
        assert of_weight is not None
        places, rows = ids.reshape(-1), of_rows.reshape(-1, of_rows.shape[-1])
        if ctx.padding_idx >= 0:
            counted = (places != ctx.padding_idx).nonzero()[:, 0]
            places, rows = places[counted], rows[counted]
        return of_weight.index_add_(0, places, rows), None, None
