"""RoFormer: sinusoidal positions are computed in Flax, torch holds them as a weight that is not trained."""

from __future__ import annotations

from easytorch.bridge.rules.table import Rules

RULES: Rules = (("[roformer.]encoder.embed_positions.weight", None, "buffer"),)
