"""`gated_delta_rule`: the linear attention of Gated DeltaNet and Qwen3-Next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from easytorch.kernels.gated_delta_rule import cpu, native
from easytorch.kernels.interop.arguments import check_scale
from easytorch.operations.dispatch.registry import OperationRegistry
from easytorch.operations.state_space import StateSpaceImpl, StateSpaceOutput


@OperationRegistry.register
class GatedDeltaRule(StateSpaceImpl):
    """`gated_delta_rule(query, key, value, g, beta, softmax_scale=None, initial_state=None, use_qk_l2norm=False,
    segment_ids=None)`: query, key (B, T, H, Dk), value (B, T, Hv, Dv), g (B, T, Hv), or (B, T, Hv, Dk) as in Kimi
    Delta Attention, -> outputs (B, T, Hv, Dv), final_state (B, Hv, Dk, Dv). `scale` is another name of softmax_scale;
    without either it is the metadata's, else Dk ** -0.5."""

    settings: ClassVar[tuple[str, ...]] = ("softmax_scale",)
    casts = ("query", "key", "value")

    paths: ClassVar = {"cpu": "aten", "cpp": "cpu", "gpu": "triton", "tpu": "xla"}

    @classmethod
    def get_impl_name(cls) -> str:
        return "gated_delta_rule"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        query, value = (torch.empty(1, 4096, heads, 128, device="meta") for heads in (16, 32))
        g = torch.empty(1, 4096, 32, device="meta")
        return (query, query, value, g, g), {"use_qk_l2norm": True}

    def supports(
        self, backend: str, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> str | None:
        if backend == "xla" and (self.metadata.runtime_dtype or value.dtype) == torch.float64:
            return "TPUs and jax, as torch_xla calls it, have no float64"
        g = args[0] if args else kwargs.get("g")
        if backend in ("triton", "xla") and isinstance(g, Tensor) and g.dim() == 4:
            return "its kernels take one decay a head, not one a channel"
        if backend == "cpu":
            return cpu.supports(query, key, self.cast(value), *args, **kwargs)
        if backend != "triton":
            return None
        from easytorch.kernels.gated_delta_rule import triton_op

        return triton_op.supports(key, value, self.metadata.runtime_dtype)

    def forward_native(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, softmax_scale: float | None = None,
        initial_state: Tensor | None = None, use_qk_l2norm: bool = False, segment_ids: Tensor | None = None,
        *, scale: float | None = None,
    ) -> StateSpaceOutput:  # fmt: skip
        return self.run(
            native.gated_delta_rule, query, key, value, g, beta, softmax_scale, initial_state, use_qk_l2norm,
            segment_ids, scale=scale,
        )  # fmt: skip

    def run(
        self, kernel: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
        softmax_scale: float | None = None, initial_state: Tensor | None = None, use_qk_l2norm: bool = False,
        segment_ids: Tensor | None = None, *, scale: float | None = None,
    ) -> StateSpaceOutput:  # fmt: skip
        if scale is not None and softmax_scale is not None:
            raise ValueError("gated_delta_rule: scale and softmax_scale are two names of one argument; give one")
        softmax_scale = check_scale("gated_delta_rule", "softmax_scale", softmax_scale)
        scale = check_scale("gated_delta_rule", "scale", scale)
        given = (softmax_scale, scale, self.metadata.softmax_scale)
        settled = next((value for value in given if value is not None), None)
        return super().run(kernel, query, key, value, g, beta, settled, initial_state, use_qk_l2norm, segment_ids)
