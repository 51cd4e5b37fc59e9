"""`flash`: attention by online softmax, memory linear in the sequence length, forward and backward."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from easytorch.kernels.attention import blocked
from easytorch.kernels.interop.installed import missing
from easytorch.operations.attention_impl import AttentionFeatures, AttentionImpl
from easytorch.operations.base import backend
from easytorch.operations.output import AttentionOutput
from easytorch.operations.registry import OperationRegistry


@OperationRegistry.register
class FlashAttention(AttentionImpl):
    """Every feature of the contract: XLA (jax) on CPU and TPU, Triton on GPU, blocks of the definition elsewhere."""

    takes_seed = frozenset({"native", "xla", "triton"})

    @classmethod
    def get_impl_name(cls) -> tuple[str, ...]:
        return ("flash", "flash_attn2")

    def refusal(
        self, backend: str, query: Tensor, key: Tensor, value: Tensor, features: AttentionFeatures
    ) -> str | None:
        if backend == "xla":
            if query.dtype == torch.float64:
                return "XLA attention computes in float32, not float64"
            return missing("jax")
        from easytorch.kernels.attention import triton_flash

        return triton_flash.supports(query, key, value, **features)

    def forward_native(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[AttentionFeatures]
    ) -> AttentionOutput:
        query, key, value, settled = self.prepare(query, key, value, features)
        return AttentionOutput(attention_outputs=blocked.attention(query, key, value, **settled))

    @backend("xla")
    def forward_cpu(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[AttentionFeatures]
    ) -> AttentionOutput:
        from easytorch.kernels.attention import xla_flash_op

        query, key, value, settled = self.prepare(query, key, value, features)
        return AttentionOutput(attention_outputs=xla_flash_op.attention(query, key, value, **settled))

    @backend("triton")
    def forward_gpu(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[AttentionFeatures]
    ) -> AttentionOutput:
        from easytorch.kernels.attention import triton_flash

        query, key, value, settled = self.prepare(query, key, value, features)
        return AttentionOutput(attention_outputs=triton_flash.flash_attention(query, key, value, **settled))

    @backend("xla")
    def forward_tpu(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[AttentionFeatures]
    ) -> AttentionOutput:
        from easytorch.kernels.attention import xla_flash_tpu

        query, key, value, settled = self.prepare(query, key, value, features)
        return AttentionOutput(attention_outputs=xla_flash_tpu.attention(query, key, value, **settled))
