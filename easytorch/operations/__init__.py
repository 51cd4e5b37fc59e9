"""Operations: one contract each, and the dispatch that picks an implementation for the tensors at hand."""

from easytorch.operations.attention import Attention
from easytorch.operations.base import BaseOperation, backend
from easytorch.operations.cross_entropy import CrossEntropy, FusedLinearCrossEntropy
from easytorch.operations.decode import DecodeAttention
from easytorch.operations.flash import FlashAttention
from easytorch.operations.glu import GeGLU, SwiGLU
from easytorch.operations.impl import Choice, OperationImpl, UnsupportedOperationError
from easytorch.operations.layer_norm import LayerNorm
from easytorch.operations.metadata import OperationMetadata
from easytorch.operations.output import AttentionOutput, OperationOutput
from easytorch.operations.registry import OperationRegistry
from easytorch.operations.ring import RingAttention
from easytorch.operations.rms_norm import RMSNorm
from easytorch.operations.rotary import Rotary
from easytorch.operations.sdpa import SdpaAttention
from easytorch.operations.vanilla import VanillaAttention

__all__ = [
    "Attention",
    "AttentionOutput",
    "BaseOperation",
    "Choice",
    "CrossEntropy",
    "DecodeAttention",
    "FlashAttention",
    "FusedLinearCrossEntropy",
    "GeGLU",
    "LayerNorm",
    "OperationImpl",
    "OperationMetadata",
    "OperationOutput",
    "OperationRegistry",
    "RMSNorm",
    "RingAttention",
    "Rotary",
    "SdpaAttention",
    "SwiGLU",
    "UnsupportedOperationError",
    "VanillaAttention",
    "backend",
]
