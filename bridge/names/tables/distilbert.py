"""DistilBERT: where positions are sinusoidal Flax computes them, torch holds them as a weight that is not trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from easytorch.bridge.rules.table import Rules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def rules(model: PreTrainedModel) -> Rules:
    """The row of the positions."""
    if not model.config.sinusoidal_pos_embds:
        return ()
    return (("[distilbert.]embeddings.position_embeddings.weight", None, "buffer"),)
