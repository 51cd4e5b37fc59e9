"""`ssm1`: the selective scan of Mamba."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from easytorch.kernels.interop.torch_func import FORWARD_REFUSAL, REFUSAL, forward_mode, transforming_in_graph
from easytorch.kernels.ssm1 import cpu, native
from easytorch.operations.dispatch.registry import OperationRegistry
from easytorch.operations.state_space import StateSpaceImpl, StateSpaceOutput


@OperationRegistry.register
class SSM1(StateSpaceImpl):
    """`ssm1(x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, initial_state=None, segment_ids=None)`:
    x (B, T, C), state (B, C, N) -> outputs (B, T, C), final_state (B, C, N)."""

    paths: ClassVar = {"cpu": "aten", "cpp": "cpu", "gpu": "triton", "tpu": "xla"}

    @classmethod
    def get_impl_name(cls) -> str:
        return "ssm1"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, A = torch.empty(1, 4096, 5120, device="meta"), torch.empty(5120, 16, device="meta")
        B = torch.empty(1, 4096, 16, device="meta")
        return (x, x, A, B, B), {"dt_softplus": True}

    def supports(self, backend: str, x: Tensor, dt: Tensor, A: Tensor, *args: Any, **kwargs: Any) -> str | None:
        if backend == "xla" and (self.metadata.runtime_dtype or x.dtype) == torch.float64:
            return "TPUs and jax, as torch_xla calls it, have no float64"
        if backend == "aten" and transforming_in_graph():
            return REFUSAL
        if backend == "aten" and forward_mode():
            return FORWARD_REFUSAL
        if backend == "cpu":
            return cpu.supports(self.cast(x), dt, A, *args, **kwargs)
        if backend != "triton":
            return None
        from easytorch.kernels.ssm1 import triton_op

        return triton_op.supports(x, A, self.metadata.runtime_dtype)

    def forward_native(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, initial_state: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> StateSpaceOutput:  # fmt: skip
        return self.run(native.ssm1, x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state, segment_ids)
