"""`decode`: attention of one query token over a long key/value cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from easytorch.kernels.cpu import processor
from easytorch.kernels.decode import aten, cpu, native, torch_xla_op
from easytorch.kernels.decode.contract import not_one_query, plain_token
from easytorch.operations.attention.impl import AttentionFeatures, AttentionImpl, named, without_float64
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.impl import Choice, UnsupportedOperationError
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.registry import OperationRegistry

# (implementation, why it comes first) where `attention` is given one query
ONE_QUERY = ("decode", "one query: the heads of a key/value head are rows, and the cache is read once")


class DecodeFeatures(AttentionFeatures, total=False):
    lengths: Tensor | None


@OperationRegistry.register
class DecodeAttention(AttentionImpl):
    """query (B, 1, H, D), key (B, S, K, D), value (B, S, K, Dv), `lengths` (B,) of valid keys; T != 1 is refused.

    kernels/decode/contract.py says what `lengths` means.
    """

    paths: ClassVar = {"cpu": "aten", "cpp": "cpu", "gpu": "triton"}
    cpp_reason = "one query: heads share a reading of the cache"

    @classmethod
    def get_impl_name(cls) -> tuple[str, ...]:
        return ("decode", "autoregressive_decodeattn")

    def supports_features(self, backend: str, query: Tensor, key: Tensor, value: Tensor, features: Any) -> str | None:
        return not_one_query(query) or super().supports_features(backend, query, key, value, features)

    def refusal(
        self, backend: str, query: Tensor, key: Tensor, value: Tensor, features: AttentionFeatures
    ) -> str | None:
        if backend == "cpu":
            return cpu.supports(query, key, value, features)
        if backend == "aten":
            return aten.supports(query, key, value, features)
        if backend == "xla":
            return torch_xla_op.supports(query, key, value, features)
        from easytorch.kernels.decode import triton_op

        return triton_op.supports(query, key, value, features)

    def prefers_cpp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        query, key, value, features = (*args, kwargs) if len(args) == 3 else named(*args, **kwargs)
        return self.leaves_to_cpp(features) and cpu.prefers(query, key, value, features)

    def run_cpp(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[DecodeFeatures]
    ) -> AttentionOutput:  # fmt: skip
        return AttentionOutput(attention_outputs=cpu.preferred(query, key, value, **features))

    def candidates(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Choice]:
        query, _, _, _ = named(*args, **kwargs)
        if (reason := not_one_query(query)) is not None:  # the definition refuses it too: nothing to fall back to
            raise UnsupportedOperationError(reason)
        return super().candidates(platform, args, kwargs)

    def one_token(self, query: Tensor, key: Tensor, value: Tensor, softmax_scale: float | None) -> Tensor | None:
        """The output of the first candidate that supports the call, for `Attention.one_token`; None if neither does."""
        if not plain_token(query, key, value):
            return None
        scale = query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        # `cpu.prefers` for tensors that `plain_token` has looked at: this is at each layer of each token
        if processor.AVX2 and cpu.takes(query, key, value):
            return cpu.one_token(query, key, value, scale)
        return aten.one_token(query, key, value, softmax_scale)

    def forward_native(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[DecodeFeatures]
    ) -> AttentionOutput:
        query, key, value, settled = self.prepare(query, key, value, features)
        output = native.decode(query, key, value, **settled, softmax_dtype=self.metadata.runtime_softmax_dtype)
        return AttentionOutput(attention_outputs=output)

    @backend("xla")
    def forward_tpu(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[DecodeFeatures]
    ) -> AttentionOutput:
        query, key, value, settled = self.prepare(query, key, value, without_float64(features))
        return AttentionOutput(attention_outputs=torch_xla_op.decode(query, key, value, **settled))

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        query = torch.empty(8, 1, 32, 128, dtype=torch.bfloat16, device="meta")
        cache = torch.empty(8, 4096, 8, 128, dtype=torch.bfloat16, device="meta")
        return (query, cache, cache), {"causal": True}
