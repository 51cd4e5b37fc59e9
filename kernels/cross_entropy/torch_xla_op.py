"""jax_fused_linear.py inside a torch_xla graph, one node forward and one backward. Under SPMD over a mesh's shards."""

from __future__ import annotations

import torch

from easytorch.kernels.cross_entropy.fused_linear import check_chunk_size, default_chunk_size
from easytorch.kernels.cross_entropy.native import check_arguments, check_linear, reduce
from easytorch.kernels.interop.installed import missing
from easytorch.kernels.interop.torch_func import REFUSAL, transforming


def supports(hidden: torch.Tensor, dtype: torch.dtype | None) -> str | None:
    """None when `fused_linear_cross_entropy` takes this call, else the reason. dtype: of the product, or hidden's."""
    if transforming():
        return REFUSAL
    if (dtype or hidden.dtype) == torch.float64:
        return "it computes in float32, not float64"
    return missing("jax")


def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> torch.Tensor:
    """hidden (..., D), weight (V, D), labels (...), bias (V,) -> the loss, float32, as `native.linear_cross_entropy`.

    Differentiable once. chunk_size: rows of a device at once, None for about 2**25 logits.
    """
    from easytorch.kernels.cross_entropy import jax_fused_linear
    from easytorch.kernels.interop.spmd import shards_of
    from easytorch.kernels.interop.xla_bridge import call_jax_with_gradient

    check_linear(hidden, weight, bias, labels)
    vocabulary, count = weight.shape[0], labels.numel()
    check_arguments((*hidden.shape[:-1], vocabulary), labels, label_smoothing, softcap, z_loss, reduction, ignore_index)
    check_chunk_size(chunk_size)
    if not count:
        return reduce(hidden.new_zeros(labels.shape, dtype=torch.float32), labels, ignore_index, reduction)
    shards = shards_of(count, vocabulary)
    parts = 1 if shards is None else jax_fused_linear.vocabulary_devices(shards)
    size = default_chunk_size(vocabulary // parts, hidden.device) if chunk_size is None else chunk_size
    settings = jax_fused_linear.Settings(float(label_smoothing), softcap, float(z_loss), size)
    at = torch.where(labels == ignore_index, jax_fused_linear.IGNORED, labels).to(torch.int32).reshape(-1)
    losses: torch.Tensor = call_jax_with_gradient(
        jax_fused_linear.forward, jax_fused_linear.backward,
        hidden.reshape(count, hidden.shape[-1]), weight, at, bias, settings=settings, shards=shards,
    )  # fmt: skip
    return reduce(losses.reshape(labels.shape), labels, ignore_index, reduction)
