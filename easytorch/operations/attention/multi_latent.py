"""`multi_latent_attention`: DeepSeek's attention over a compressed cache of keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor

from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.multi_latent import absorbed, cpu, native, plans
from easytorch.kernels.multi_latent.contract import LatentDims, absorbs, check_tensors, default_scale
from easytorch.kernels.ragged_page.contract import FEATURES
from easytorch.operations.attention.impl import AttentionFeatures, AttentionImpl, xla_refusal
from easytorch.operations.attention.selection import Attention
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.metadata import OperationMetadata
from easytorch.operations.dispatch.output import AttentionOutput
from easytorch.operations.dispatch.registry import OperationRegistry

Optional = Tensor | None


@OperationRegistry.register
class MultiLatentAttention(AttentionImpl):
    """`op(query, query_rope, latent, key_rope, up_key=None, up_value=None, **features)` -> `AttentionOutput`.

    (B, T, H, Dn), (B, T, H, R), (B, S, L), (B, S, R), (H, Dn, L), (H, Dv, L) -> (B, T, H, Dv), with the features of the
    attention contract; kernels/multi_latent/contract.py says the rest. The expanded form, with keys and values of every
    head, runs `attention`, which selects its own implementation.
    """

    paths: ClassVar = {"gpu": "triton", "tpu": "pallas"}
    folder = "multi_latent"
    takes_seed = frozenset({"native"})
    cpp_reason = "few tokens: all heads share a reading of the latents, and one call projects before and after"

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        # a forced backend is meant for this operation alone; scale and dropout are resolved here
        self.attention = Attention(dataclasses.replace(self.metadata, backend=None, softmax_scale=None, dropout_prob=0))

    @classmethod
    def get_impl_name(cls) -> tuple[str, ...]:
        return ("multi_latent_attention", "mla")

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="meta")

        up = empty(128, 128, 512)
        return (empty(8, 1, 128, 128), empty(8, 1, 128, 64), empty(8, 4096, 512), empty(8, 4096, 64), up, up), {}

    def supports(  # type: ignore[override]
        self,
        backend: str,
        query: Tensor,
        query_rope: Tensor,
        latent: Tensor,
        key_rope: Tensor,
        up_key: Optional = None,
        up_value: Optional = None,
        **features: Unpack[AttentionFeatures],
    ) -> str | None:
        if backend == "native":
            return None
        if (reason := self.beyond_common(backend, features)) is not None:
            return reason
        if (reason := self.metadata.softmax_refusal(query.dtype)) is not None:
            return reason
        if backend == "aten":
            return None
        if backend == "cpu":
            given = self._cast_all(query, query_rope, latent, key_rope, up_key, up_value)
            return cpu.supports(*given, **self._settled(cast(AttentionFeatures, {**features})))
        tensors = (query, query_rope, latent, key_rope, up_key, up_value)
        sizes = check_tensors(*tensors)
        if self._expands(backend, sizes, tensors, features):
            return None
        return self._kernel_refusal(backend, sizes, tensors, features)

    def forward_native(
        self,
        query: Tensor,
        query_rope: Tensor,
        latent: Tensor,
        key_rope: Tensor,
        up_key: Optional = None,
        up_value: Optional = None,
        **features: Unpack[AttentionFeatures],
    ) -> AttentionOutput:
        tensors = self._cast_all(query, query_rope, latent, key_rope, up_key, up_value)
        output, weights = native.multi_latent_attention(
            *tensors, **self._settled(features), softmax_dtype=self.metadata.runtime_softmax_dtype
        )
        return AttentionOutput(attention_outputs=output, attention_weights=weights)

    @backend("aten")
    def forward_cpu(
        self,
        query: Tensor,
        query_rope: Tensor,
        latent: Tensor,
        key_rope: Tensor,
        up_key: Optional = None,
        up_value: Optional = None,
        **features: Unpack[AttentionFeatures],
    ) -> AttentionOutput:
        tensors = self._cast_all(query, query_rope, latent, key_rope, up_key, up_value)
        settled = self._settled(features)
        sizes = check_tensors(*tensors)
        if not absorbs(sizes, query.shape[1], latent.shape[1], up_key is not None, up_value is not None):
            return self._expanded(sizes, tensors, settled)
        return AttentionOutput(attention_outputs=absorbed.multi_latent_attention(*tensors, **settled))

    @backend("cpu")
    def forward_cpp(
        self,
        query: Tensor,
        query_rope: Tensor,
        latent: Tensor,
        key_rope: Tensor,
        up_key: Optional = None,
        up_value: Optional = None,
        **features: Unpack[AttentionFeatures],
    ) -> AttentionOutput:
        tensors = self._cast_all(query, query_rope, latent, key_rope, up_key, up_value)
        return AttentionOutput(attention_outputs=cpu.multi_latent_attention(*tensors, **self._settled(features)))

    def prefers_cpp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self.leaves_to_cpp(kwargs) and cpu.prefers(*args, **kwargs)

    def run(
        self,
        kernel: Callable[..., Tensor],
        query: Tensor,
        query_rope: Tensor,
        latent: Tensor,
        key_rope: Tensor,
        up_key: Optional = None,
        up_value: Optional = None,
        **features: Unpack[AttentionFeatures],
    ) -> AttentionOutput:
        """Expanded to `attention`, or absorbed by `kernel`, an accelerator's."""
        tensors = self._cast_all(query, query_rope, latent, key_rope, up_key, up_value)
        settled = self._settled(features)
        sizes = check_tensors(*tensors)
        if self._expands("pallas" if query.device.type == "xla" else "triton", sizes, tensors, settled):
            return self._expanded(sizes, tensors, settled)
        kept = {name: value for name, value in settled.items() if name in FEATURES}
        return AttentionOutput(attention_outputs=kernel(*tensors, **kept))

    def _expands(
        self, backend: str, sizes: LatentDims, tensors: tuple[Optional, ...], features: AttentionFeatures
    ) -> bool:
        """On accelerators: whether to expand every head's keys, as for calls that the absorbed kernel refuses.

        The kernel has no backward, so training expands.
        """
        query, _, latent, _, up_key, up_value = tensors
        assert query is not None and latent is not None
        if up_key is None or up_value is None:
            return False
        if not absorbs(sizes, query.shape[1], latent.shape[1], True, True):
            return True
        return self._kernel_refusal(backend, sizes, tensors, features) is not None

    def _kernel_refusal(
        self, backend: str, sizes: LatentDims, tensors: tuple[Optional, ...], features: AttentionFeatures
    ) -> str | None:
        given = (*tensors, features.get("sinks"))
        if recording(*given):
            return "the kernel that attends to latents has no backward, and this call needs a gradient"
        if self._settled(cast(AttentionFeatures, dict(features))).get("dropout_prob"):
            return "the kernel that attends to latents has no dropout"
        for name, value in features.items():
            if value is not None and name not in FEATURES and name not in ("dropout_prob", "seed"):
                return f"the kernel that attends to latents takes no {name}"
        query = tensors[0]
        assert query is not None
        dtype = self.metadata.runtime_dtype or query.dtype
        if backend == "pallas":
            return xla_refusal(dtype)
        from easytorch.kernels.multi_latent import triton_op

        return triton_op.supports(query.device, dtype, sizes)

    def _expanded(self, sizes: LatentDims, tensors: tuple[Any, ...], features: AttentionFeatures) -> AttentionOutput:
        scale = default_scale(sizes, features.get("softmax_scale"))
        settled = cast(AttentionFeatures, {**features, "softmax_scale": scale})
        output: AttentionOutput = self.attention(*plans.expand(*tensors), **settled)
        return output

    def _cast_all(self, *tensors: Optional) -> tuple[Any, ...]:
        return tuple(None if tensor is None else self.cast(tensor) for tensor in tensors)
