"""The attention operations: the implementations, and `attention`, which selects one of them for each call."""

from easytorch.operations.attention.selection import PREFERENCES, Attention

__all__ = ["PREFERENCES", "Attention"]
