"""What a native model can do beyond `transformers.PreTrainedModel`, one file a capability.

base.py     `BaseModuleProtocol`: the interface, by EasyDeL's names, of what is carried out today
bridge.py   `BridgeMixin`: weights to and from JAX/Flax, and a plain transformers model of the same weights
"""

from easytorch.protocol.base import BaseModuleProtocol
from easytorch.protocol.bridge import BridgeMixin

__all__ = ["BaseModuleProtocol", "BridgeMixin"]
