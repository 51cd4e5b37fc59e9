"""The loss of encoders that predict words, from hidden states: logits are made of the labelled positions alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from easytorch.layers.causal_loss import causal_lm_loss, plain_parameters
from easytorch.layers.deferred_logits import defers
from easytorch.layers.linear import watched

IGNORED = -100


class WordModel(Protocol):
    training: bool

    @property
    def base_model(self) -> nn.Module: ...

    def children(self) -> Iterator[nn.Module]: ...

    def get_output_embeddings(self) -> nn.Module: ...

    def word_parameters(self) -> tuple[Tensor | None, Tensor | None]:
        """The matrix (V, E) and the bias (V,) of the words; (None, None) where their product is no plain one."""
        ...

    def word_states(self, hidden_states: Tensor) -> Tensor | None:
        """hidden_states (..., D) -> what the matrix of the words multiplies (..., E); None where it is not known."""
        ...


def fused_word_loss(model: WordModel, hidden_states: Tensor, labels: Tensor, **kwargs: Any) -> Tensor | None:
    """The mean cross entropy of the words at hidden_states (..., D) whose labels (...) are not -100.

    kwargs: those of `causal_lm_loss`. None where it needs the logits: outside of training, where a module of the head
    has hooks or is no plain one; or where they are few.
    """
    weight, bias = model.word_parameters()
    if weight is None or not model.training or not defers(hidden_states, weight) or _hooked(model, weight):
        return None
    rows, targets = hidden_states.flatten(0, -2), labels.flatten().to(hidden_states.device)
    if rows.is_cpu:  # elsewhere their number would have to be waited for
        labelled = targets != IGNORED
        if bool(labelled.any()):
            rows, targets = rows[labelled], targets[labelled]
    states = model.word_states(rows)
    if states is None or states.dtype is not weight.dtype:
        return None
    return causal_lm_loss(states, weight, targets, bias, shift_labels=targets, **kwargs)


def fused_loss_of(head: nn.Module, hidden_states: Tensor, labels: Tensor, added: Tensor | None = None) -> Tensor | None:
    """The loss of `labels` (...) by a head of hidden_states (..., D), without their logits; None where it needs them.

    added: a bias of the logits, (V,) or (1, V).
    """
    weight, bias = plain_parameters(head)
    if not head.training or weight is None or bias is not None or hidden_states.shape[:-1] != labels.shape:
        return None
    if hidden_states.dtype is not weight.dtype or not defers(hidden_states, weight):
        return None
    added = None if added is None else added.flatten().to(weight.device, weight.dtype)
    return causal_lm_loss(hidden_states, weight, labels, added, shift_labels=labels)


def _hooked(model: WordModel, weight: Tensor) -> bool:
    """Whether a module of the head has hooks, which are to see every position; those of the weight's were looked at."""
    heads = (one for one in model.children() if one is not model.base_model)
    parts = (part for head in heads for part in head.modules())
    return any(watched(part) for part in parts if part._parameters.get("weight") is not weight)
