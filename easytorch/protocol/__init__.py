"""What a native model can do beyond `transformers.PreTrainedModel`, one file a capability.

base.py          `BaseModuleProtocol`: the interface, by EasyDeL's names, of what is carried out today
native.py        `NativeModel`: the base class of every native family
bridge.py        `BridgeMixin`: weights to and from JAX/Flax, and a plain transformers model of the same weights
checkpoint.py    which file a folder or name stands for, and that it is whole
flax_trees.py    the same for any transformers model, as functions
flax_weights.py  a Flax checkpoint given to a `from_pretrained`
loading.py       which weights a checkpoint may lack, or hold in addition
repeats.py       weights it holds under another of their names
"""

from easytorch.protocol.base import BaseModuleProtocol
from easytorch.protocol.bridge import BridgeMixin

__all__ = ["BaseModuleProtocol", "BridgeMixin"]
