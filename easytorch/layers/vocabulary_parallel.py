"""The loss of a head whose weight tensor parallelism shards by the vocabulary: no rank has all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sharded_parameters(layer: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The weight and bias of a `nn.Linear` whose output features are sharded evenly over one mesh axis, in eager mode;
    else (None, None)."""
    # transformers' mark of a tensor parallel layer, whose inputs are the same on every rank: FSDP has DTensors too
    if type(layer) is not nn.Linear or not layer.__dict__.get("_is_hooked") or torch.compiler.is_compiling():
        return None, None
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return None, None
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if not _by_rows(weight) or not (bias is None or _by_rows(bias)):
        return None, None
    return weight, bias


def product(hidden: Tensor, weight: Any, bias: Any = None) -> Tensor:
    """hidden (..., D), the same on every rank -> hidden @ weight.T + bias (..., V), gathered from shards by V."""
    if not hasattr(weight, "device_mesh"):
        return F.linear(hidden, weight, bias)
    from torch.distributed.tensor import DTensor, Replicate

    placed = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    logits: Any = F.linear(placed, weight, bias)
    gathered: Tensor = logits.full_tensor()
    return gathered


def vocabulary_parallel_cross_entropy(
    hidden: Tensor, weight: Any, labels: Tensor, bias: Any = None, **options: Any
) -> Tensor:
    """hidden (..., D) and labels (...), the same on every rank, and DTensors weight (V, D), bias (V,), sharded by V.

    `fused_linear_cross_entropy` with its keywords, computed in the dtype that a linear layer would be. Every rank of
    the weight's mesh makes the same call and gets the loss, and the gradient of hidden, of the whole vocabulary.
    """
    # here, since torch.distributed takes as long to import as a model
    from torch.distributed.tensor import Shard

    from easytorch.kernels.cross_entropy import vocabulary_parallel

    mesh = weight.device_mesh
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype

    def own(parameter: Any) -> Tensor:
        part: Tensor = parameter.to_local(grad_placements=[Shard(0)]).to(dtype)
        return part

    part = own(weight)
    return vocabulary_parallel.cross_entropy(
        hidden.to(dtype), part, labels, None if bias is None else own(bias), group=mesh.get_group(),
        first=mesh.get_local_rank() * part.shape[0],
        vocabulary=weight.shape[0], **options,
    )  # fmt: skip


def _by_rows(parameter: Any) -> bool:
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.ndim != 1 or parameter.shape[0] % mesh.size():
        return False
    (placement,) = parameter.placements
    # a strided shard is a subclass in some versions of torch
    return type(placement).__name__ == "Shard" and placement.dim == 0
