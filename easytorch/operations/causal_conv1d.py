"""`causal_conv1d`: a short depthwise causal convolution, and the state from which the next tokens continue."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from easytorch.kernels.causal_conv1d import cpu, native
from easytorch.operations.dispatch.registry import OperationRegistry
from easytorch.operations.state_space import StateSpaceImpl, StateSpaceOutput


@OperationRegistry.register
class CausalConv1d(StateSpaceImpl):
    """`causal_conv1d(x, weight, bias=None, initial_state=None, activation=None, segment_ids=None)`: x (B, T, C),
    weight (C, W) -> outputs (B, T, C), final_state (B, C, W-1)."""

    paths: ClassVar = {"cpu": "aten", "cpp": "cpu", "gpu": "triton"}

    @classmethod
    def get_impl_name(cls) -> str:
        return "causal_conv1d"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, weight = torch.empty(1, 4096, 5120, device="meta"), torch.empty(5120, 4, device="meta")
        return (x, weight), {"activation": "silu"}

    def supports(self, backend: str, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> str | None:
        if backend == "cpu":
            return cpu.supports(self.cast(x), weight, *args, **kwargs)
        if backend != "triton":
            return None
        from easytorch.kernels.causal_conv1d import triton_op

        return triton_op.supports(x, weight, self.metadata.runtime_dtype)

    def forward_native(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_state: Tensor | None = None,
        activation: str | None = None, segment_ids: Tensor | None = None,
    ) -> StateSpaceOutput:  # fmt: skip
        return self.run(native.causal_conv1d, x, weight, bias, initial_state, activation, segment_ids)
