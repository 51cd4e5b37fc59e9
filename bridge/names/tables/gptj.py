"""GPT-J: older checkpoints hold the causal mask of each layer, and the number it fills in; transformers before 5.24
had the angles of the positions in each layer."""

from __future__ import annotations

from easytorch.bridge.rules.table import Rules

RULES: Rules = (("[transformer.]h.{i}.attn.{mask:bias|masked_bias|embed_positions}", None, "buffer"),)
