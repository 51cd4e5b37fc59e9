"""Operations: one contract each, and the dispatch that selects an implementation for the given tensors."""

from easytorch.operations.attention.blocksparse import BlockSparseAttention
from easytorch.operations.attention.decode import DecodeAttention
from easytorch.operations.attention.flash import FlashAttention
from easytorch.operations.attention.multi_latent import MultiLatentAttention
from easytorch.operations.attention.ragged_page import RaggedPageAttention
from easytorch.operations.attention.ragged_page_multi_latent import RaggedPageMultiLatentAttention
from easytorch.operations.attention.ring import RingAttention
from easytorch.operations.attention.sdpa import SdpaAttention
from easytorch.operations.attention.selection import Attention
from easytorch.operations.attention.vanilla import VanillaAttention
from easytorch.operations.causal_conv1d import CausalConv1d
from easytorch.operations.cross_entropy import CrossEntropy, FusedLinearCrossEntropy
from easytorch.operations.dispatch.base import BaseOperation, backend
from easytorch.operations.dispatch.impl import Choice, OperationImpl, UnsupportedOperationError
from easytorch.operations.dispatch.metadata import OperationMetadata
from easytorch.operations.dispatch.output import AttentionOutput, OperationOutput
from easytorch.operations.dispatch.registry import OperationRegistry
from easytorch.operations.former_paths import keep_former_paths
from easytorch.operations.gated_delta_rule import GatedDeltaRule
from easytorch.operations.glu import GeGLU, SwiGLU
from easytorch.operations.grouped_matmul import GroupedMatmul
from easytorch.operations.layer_norm import LayerNorm
from easytorch.operations.linear import Linear
from easytorch.operations.quantized_matmul import QuantizedMatmul
from easytorch.operations.rms_norm import RMSNorm
from easytorch.operations.rotary import Rotary
from easytorch.operations.ssm1 import SSM1
from easytorch.operations.ssm2 import SSM2
from easytorch.operations.state_space import StateSpaceOutput

__all__ = [
    "SSM1",
    "SSM2",
    "Attention",
    "AttentionOutput",
    "BaseOperation",
    "BlockSparseAttention",
    "CausalConv1d",
    "Choice",
    "CrossEntropy",
    "DecodeAttention",
    "FlashAttention",
    "FusedLinearCrossEntropy",
    "GatedDeltaRule",
    "GeGLU",
    "GroupedMatmul",
    "LayerNorm",
    "Linear",
    "MultiLatentAttention",
    "OperationImpl",
    "OperationMetadata",
    "OperationOutput",
    "OperationRegistry",
    "QuantizedMatmul",
    "RMSNorm",
    "RaggedPageAttention",
    "RaggedPageMultiLatentAttention",
    "RingAttention",
    "Rotary",
    "SdpaAttention",
    "StateSpaceOutput",
    "SwiGLU",
    "UnsupportedOperationError",
    "VanillaAttention",
    "backend",
]

keep_former_paths()
