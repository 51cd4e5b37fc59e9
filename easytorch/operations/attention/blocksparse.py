"""`blocksparse`: attention that skips masked blocks: windows, chunks, prefixes, documents, masks; any length."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from easytorch.kernels.blocksparse import native
from easytorch.kernels.interop.installed import missing
from easytorch.kernels.interop.torch_func import REFUSAL, transforming
from easytorch.operations.attention.impl import AttentionFeatures, AttentionImpl, without_float64
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.registry import OperationRegistry


class BlockSparseFeatures(AttentionFeatures, total=False):
    """The features of every attention and blocksparse's own, which kernels/blocksparse/native.py defines."""

    chunk_size: int | None
    prefix_length: int | Tensor | None


BEYOND_THE_CONTRACT = frozenset({"chunk_size", "prefix_length"})


@OperationRegistry.register
class BlockSparseAttention(AttentionImpl):
    """Every feature of the contract, chunks and prefixes; key blocks masked for a whole query block are skipped."""

    paths: ClassVar = {"cpu": "aten", "gpu": "triton"}
    functions: ClassVar = {"aten": "aten_op.attention", "triton": "triton_op.blocksparse_attention"}
    takes_seed = frozenset({"native", "aten", "triton", "pallas"})

    @classmethod
    def get_impl_name(cls) -> tuple[str, ...]:
        return ("blocksparse", "splash")

    def refusal(
        self, backend: str, query: Tensor, key: Tensor, value: Tensor, features: AttentionFeatures
    ) -> str | None:
        if transforming():
            return REFUSAL
        if backend == "aten":
            return None
        if backend == "pallas":
            if query.dtype == torch.float64:
                return "the Pallas kernels compute in float32, not float64"
            return missing("jax")
        from easytorch.kernels.blocksparse import triton_op

        return triton_op.supports(query, key, value)

    def forward_native(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[BlockSparseFeatures]
    ) -> AttentionOutput:
        query, key, value, settled = self.prepare(query, key, value, features)
        output, weights = native.attention(
            query, key, value, **settled, softmax_dtype=self.metadata.runtime_softmax_dtype
        )
        return AttentionOutput(attention_outputs=output, attention_weights=weights)

    @backend("pallas")
    def forward_tpu(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[BlockSparseFeatures]
    ) -> AttentionOutput:
        from easytorch.kernels.blocksparse import torch_xla_op

        query, key, value, settled = self.prepare(query, key, value, without_float64(features))
        return AttentionOutput(attention_outputs=torch_xla_op.attention(query, key, value, **settled))

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        heads = torch.empty(1, 8192, 16, 64, dtype=torch.bfloat16, device="meta")
        return (heads, heads, heads), {"causal": True, "sliding_window": 1024}
