"""GPT-Neo: older checkpoints hold the causal mask of each layer, and the number it fills in."""

from __future__ import annotations

from easytorch.bridge.rules.table import Rules

RULES: Rules = (("[transformer.]h.{i}.attn.attention.{mask:bias|masked_bias}", None, "buffer"),)
