"""Weights to and from JAX/Flax."""


class BridgeMixin:
    pass
