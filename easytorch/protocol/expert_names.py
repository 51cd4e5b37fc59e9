"""How checkpoints name the weight of one expert, and its place in a model's stacked experts."""

from __future__ import annotations

import re

# One expert's layer by its torch name.
EXPERT = re.compile(r".+\.experts\.(?P<number>\d+)\.(?P<part>\w+)")
PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
# The parts of a stack, in the order of its rows.
STACKS = {("gate", "up"): "gate_up_proj", ("gate",): "gate_proj", ("up",): "up_proj", ("down",): "down_proj"}
_LAYER = re.compile(r"\.(\d+)\.")


def layer_number(name: str) -> int | None:
    """The index of the layer that `name` belongs to."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])
