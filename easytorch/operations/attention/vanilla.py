"""`vanilla`: the definition of attention, which computes all scores and returns the weights."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from easytorch.kernels.attention import native
from easytorch.operations.attention.impl import AttentionFeatures, AttentionImpl
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.registry import OperationRegistry


@OperationRegistry.register
class VanillaAttention(AttentionImpl):
    """Attention as kernels/attention/contract.py states it, in plain torch; carries every feature on every device."""

    @classmethod
    def get_impl_name(cls) -> tuple[str, ...]:
        return ("vanilla", "eager")  # transformers calls it eager

    def forward_native(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[AttentionFeatures]
    ) -> AttentionOutput:
        query, key, value, settled = self.prepare(query, key, value, features)
        output, weights = native.attention(
            query, key, value, **settled, softmax_dtype=self.metadata.runtime_softmax_dtype
        )
        return AttentionOutput(attention_outputs=output, attention_weights=weights)
