"""BigBird: torch has a pooler under every head but one, Flax only under the heads that read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from easytorch.bridge.rules.table import Rules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WITHOUT = ("BigBirdForCausalLM", "BigBirdForMaskedLM", "BigBirdForTokenClassification")


def rules(model: PreTrainedModel) -> Rules:
    """The rows of a pooler that Flax does not have."""
    if type(model).__name__ not in _WITHOUT:
        return ()
    return (("bert.pooler.weight", None, "buffer"), ("bert.pooler.bias", None, "buffer"))
