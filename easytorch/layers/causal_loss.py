"""transformers' loss of causal language models from hidden states, without materializing every logit."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from easytorch.layers.linear import watched
from easytorch.layers.vocabulary_parallel import vocabulary_parallel_cross_entropy
from easytorch.operations import OperationRegistry

fused_linear_cross_entropy = OperationRegistry.create("fused_linear_cross_entropy")


def causal_lm_loss(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> Tensor:
    """hidden_states (B, T, D), weight (V, D), labels (B, T): `ForCausalLMLoss` of the logits, and its keywords.

    The labels are shifted by one unless `shift_labels` are given. The sum of the losses is divided by
    `num_items_in_batch`, else by the number of labels that are not ignored: NaN where all are, as in transformers.
    weight and bias may be DTensors, sharded by the vocabulary.
    """
    if shift_labels is None:
        shift_labels = shifted_by_one(labels, ignore_index)
    shift_labels = shift_labels.reshape(-1).to(hidden_states.device)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    loss = vocabulary_parallel_cross_entropy if hasattr(weight, "device_mesh") else fused_linear_cross_entropy
    total = loss(rows, weight, shift_labels, bias, ignore_index=ignore_index, softcap=softcap, reduction="sum")
    count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return mean_loss(total, count)


def shifted_by_one(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """labels (B, T) of the tokens themselves -> of the next tokens, `ignore_index` for the last."""
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def mean_loss(total: Tensor, count: Tensor | float) -> Tensor:
    """total / count: NaN where nothing was counted, as torch's `cross_entropy`, and with its gradients, zeros.

    Those of a division by zero are infinite, which a loss that forms no logits would multiply by its zeros.
    """
    if not isinstance(count, Tensor):
        return total / count
    count = count.to(total.device)
    none = count == 0
    return torch.where(none, torch.nan, total / torch.where(none, 1, count))


def plain_parameters(layer: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The weight and bias of a plain `nn.Linear` without hooks, in eager mode; else (None, None).

    Hooks with a true attribute `annotates_sharding` do not count: they are for the logits alone.
    """
    if type(layer) is not nn.Linear or "bias" not in layer._parameters:
        return None, None
    weight, bias = plain_tensors(layer._parameters.get("weight"), layer._parameters["bias"])
    return (None, None) if weight is None or watched(_without_annotations(layer)) else (weight, bias)


def plain_tensors(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """They, where both are plain parameters on a device that has the fused losses, in eager mode; else (None, None)."""
    if weight is None or type(weight) is not nn.Parameter or not (bias is None or type(bias) is nn.Parameter):
        return None, None
    if torch.compiler.is_compiling() or weight.device.type not in ("cpu", "cuda", "xla"):
        return None, None
    return weight, bias


def _without_annotations(layer: nn.Linear) -> nn.Linear:
    """The layer, or a copy of it without its hooks where all of these annotate a sharding."""
    hooks = layer._forward_hooks
    if not hooks or not all(getattr(hook, "annotates_sharding", False) for hook in hooks.values()):
        return layer
    bare = copy.copy(layer)
    bare._forward_hooks = OrderedDict()
    return bare
