"""Mistral: Llama's weights, without biases."""

from __future__ import annotations

from easytorch.bridge.outline import Outline
from easytorch.bridge.outlines.fields import size
from easytorch.bridge.outlines.llama import FIELDS, fits, heads_of

# Absent, the number of key and value heads is 8 here, and a window's default has changed: both must be said.
_OWN = {"num_key_value_heads": size(), "sliding_window": size(None)}
OUTLINE = Outline("model", {**FIELDS, **_OWN}, heads_of("Mistral"), fits)
