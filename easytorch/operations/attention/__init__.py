"""The attention operations: `attention`, which selects one of the others for each call, and those others."""

from easytorch.operations.attention.selection import PREFERENCES, Attention

__all__ = ["PREFERENCES", "Attention"]
