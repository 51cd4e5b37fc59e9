"""BigBird: torch has a pooler under every head but one, Flax only under the heads that read it."""

from __future__ import annotations

from transformers import PreTrainedModel

from easytorch.bridge.rules import Rules

_WITHOUT = ("BigBirdForCausalLM", "BigBirdForMaskedLM", "BigBirdForTokenClassification")


def rules(model: PreTrainedModel) -> Rules:
    """The rows of a pooler that Flax does not have."""
    if type(model).__name__ not in _WITHOUT:
        return ()
    return (("bert.pooler.weight", None, "buffer"), ("bert.pooler.bias", None, "buffer"))
