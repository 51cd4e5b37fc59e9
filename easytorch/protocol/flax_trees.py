"""`easytorch.protocol.conversion` under its first name, which code of users has."""

from easytorch.protocol.conversion import from_flax, state_dict_from_flax, to_flax, to_torch, transform_fn

__all__ = ["from_flax", "state_dict_from_flax", "to_flax", "to_torch", "transform_fn"]
