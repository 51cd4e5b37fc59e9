"""`flash`: attention by online softmax, memory linear in the sequence length, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Unpack

from torch import Tensor

from easytorch.kernels.attention import blocked, cpu, varlen
from easytorch.kernels.interop.torch_func import REFUSAL, transforming, transforming_in_graph
from easytorch.operations.attention.impl import AttentionFeatures, AttentionImpl, without_float64, xla_refusal
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.registry import OperationRegistry


class FlashFeatures(AttentionFeatures, total=False):
    """The features of every attention, and the bounds of packed sequences (kernels/attention/varlen.py)."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


@OperationRegistry.register
class FlashAttention(AttentionImpl):
    """Every feature of the contract: ATen's products on CPU, Triton on GPU, XLA on TPU, the definition elsewhere.

    `attention` chooses `flash:cpu` where it is faster: in C++, without the gradient of a bias.
    XLA (jax) runs on the CPU too where it is forced: `backend="flash:xla"`.
    With `cu_seqlens_q` and `cu_seqlens_k` (sequences + 1,) the tokens are sequences of different lengths packed in one
    row, (1, tokens, heads, head_dim) or (tokens, heads, head_dim), and each attends to itself only: see `varlen`.
    """

    paths: ClassVar = {"cpu": "aten", "cpp": "cpu", "gpu": "triton"}
    folder = "attention"
    functions: ClassVar = {
        "aten": "aten_op.attention", "cpu": "cpu.attention", "triton": "triton_flash.flash_attention",
    }  # fmt: skip
    cpp_reason = "tiles of scores stay in the caches, bfloat16 is multiplied by dot products"
    takes_seed = frozenset({"native", "aten", "cpu", "xla", "triton"})

    @classmethod
    def get_impl_name(cls) -> tuple[str, ...]:
        return ("flash", "flash_attn2")

    def refusal(
        self, backend: str, query: Tensor, key: Tensor, value: Tensor, features: AttentionFeatures
    ) -> str | None:
        if backend == "cpu":
            packed = any(features.get(name) is not None for name in _PACKED)
            return "it does not take packed sequences" if packed else cpu.supports(query, key, value, features)
        if backend == "aten":
            return REFUSAL if transforming_in_graph() else None
        if backend == "xla":
            if transforming():
                return REFUSAL
            return xla_refusal(query.dtype)
        from easytorch.kernels.attention import triton_flash

        return triton_flash.supports(query, key, value)

    def run_cpp(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[FlashFeatures]
    ) -> AttentionOutput:  # fmt: skip
        return AttentionOutput(attention_outputs=cpu.preferred(query, key, value, **features))

    def emulates(self, backend: str, platform: str) -> bool:
        return (backend == "xla" and platform == "cpu") or super().emulates(backend, platform)

    def forward_native(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[FlashFeatures]
    ) -> AttentionOutput:
        dtype = self.metadata.runtime_softmax_dtype
        more: Any = {} if dtype is None else {"softmax_dtype": dtype}
        return self.run(blocked.attention, query, key, value, **features, **more)

    @backend("xla")
    def forward_tpu(
        self, query: Tensor, key: Tensor, value: Tensor, **features: Unpack[FlashFeatures]
    ) -> AttentionOutput:
        features = without_float64(features)
        if query.device.type == "cpu":
            from easytorch.kernels.attention import jax_op

            return self.run(jax_op.attention, query, key, value, **features)
        from easytorch.kernels.attention import torch_xla_op

        return self.run(torch_xla_op.attention, query, key, value, **features)

    def varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        **features: Unpack[AttentionFeatures],
    ) -> AttentionOutput:
        """(tokens, H, D), (keys, K, D), (keys, K, Dv) -> (tokens, H, Dv), arguments as in `flash_attn_varlen_func`.

        Sequence b has the queries cu_seqlens_q[b] up to cu_seqlens_q[b + 1] and its keys likewise; causal and window
        are aligned to its own last query and key. max_seqlen_*: at least the longest lengths; None finds them.
        """
        features.setdefault("dropout_prob", 0.0)  # as in flash-attn, the metadata's does not count here
        output: AttentionOutput = self(
            query, key, value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, **features,
        )  # fmt: skip
        return output

    def run(self, kernel: Callable[..., Tensor], *args: Any, **kwargs: Any) -> AttentionOutput:
        packed = {name: kwargs.pop(name, None) for name in _PACKED}
        if packed["cu_seqlens_q"] is None and packed["cu_seqlens_k"] is None:
            return super().run(kernel, *args, **kwargs)
        return super().run(functools.partial(varlen.attention, kernel, **packed), *args, **kwargs)


_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
