"""What a layout of one's own is made of (`bridge.layouts`)."""

from easytorch.bridge.rules.transforms import Transform

__all__ = ["Transform"]
