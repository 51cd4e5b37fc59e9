"""`sdpa`: attention by ATen's `scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from easytorch.kernels.attention import aten, blocked
from easytorch.operations.attention.impl import AttentionFeatures, AttentionImpl
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.registry import OperationRegistry


@OperationRegistry.register
class SdpaAttention(AttentionImpl):
    """ATen carries all but softcap, sinks and seeded dropout; mask, window, segments and bias become its one mask."""

    falls_back = False

    @classmethod
    def get_impl_name(cls) -> tuple[str, ...]:
        return ("sdpa", "cudnn")  # on CUDA ATen takes cuDNN's kernel where it is the better one

    def refusal(
        self, backend: str, query: Tensor, key: Tensor, value: Tensor, features: AttentionFeatures
    ) -> str | None:
        get = features.get
        if get("softcap") is get("sinks") is get("bias") is get("seed") is None:
            return None  # the common case, answered before the features are passed on
        return aten.supports(query, features)

    def forward_native(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[AttentionFeatures]
    ) -> AttentionOutput:
        query, key, value, settled = self.prepare(query, key, value, features)
        output = blocked.attention(query, key, value, **settled, softmax_dtype=self.metadata.runtime_softmax_dtype)
        return AttentionOutput(attention_outputs=output)

    @backend("aten")
    def forward_cpu(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[AttentionFeatures]
    ) -> AttentionOutput:
        query, key, value, settled = self.prepare(query, key, value, features)
        return AttentionOutput(attention_outputs=aten.attention(query, key, value, **settled))

    @backend("aten")
    def forward_gpu(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[AttentionFeatures]
    ) -> AttentionOutput:
        return self.forward_cpu(query, key, value, **features)
