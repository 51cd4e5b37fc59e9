"""What a native model can do beyond `transformers.PreTrainedModel`, one file per capability.

base.py              `BaseModuleProtocol`: the implemented part of EasyDeL's interface
native.py            `NativeModel`: the base class of every native family
bridge.py            `BridgeMixin`: weights to and from JAX/Flax, and a plain transformers model of the same weights
loading.py           `from_pretrained`, of native models and of transformers' own
checkpoint_files.py  which file a folder or name stands for, and whether it is complete
flax_loading.py      a Flax checkpoint given to a `from_pretrained`
tied_weights.py      weights a checkpoint holds under another of their names
load_checks.py       which weights a checkpoint may lack, or hold in addition
conversion.py        weights to and from JAX/Flax for any transformers model, as functions
"""

from easytorch.protocol.base import BaseModuleProtocol
from easytorch.protocol.bridge import BridgeMixin

__all__ = ["BaseModuleProtocol", "BridgeMixin"]
