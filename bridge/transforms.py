"""`Transform`, of which users make layouts of their own (`bridge.layouts`)."""

from easytorch.bridge.rules.transforms import Transform

__all__ = ["Transform"]
