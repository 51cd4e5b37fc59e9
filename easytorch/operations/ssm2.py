"""`ssm2`: the scan of Mamba-2."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from easytorch.kernels.ssm2 import cpu, native
from easytorch.operations.dispatch.registry import OperationRegistry
from easytorch.operations.state_space import StateSpaceImpl, StateSpaceOutput


@OperationRegistry.register
class SSM2(StateSpaceImpl):
    """`ssm2(x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0, inf), initial_state=None,
    segment_ids=None)`: x (B, T, H, P), state (B, H, P, N) -> outputs (B, T, H, P), final_state (B, H, P, N)."""

    paths: ClassVar = {"cpu": "aten", "cpp": "cpu", "gpu": "triton", "tpu": "xla"}

    @classmethod
    def get_impl_name(cls) -> str:
        return "ssm2"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, dt = torch.empty(1, 4096, 80, 64, device="meta"), torch.empty(1, 4096, 80, device="meta")
        A, B = torch.empty(80, device="meta"), torch.empty(1, 4096, 1, 128, device="meta")
        return (x, dt, A, B, B), {"dt_softplus": True}

    def supports(
        self, backend: str, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any, **kwargs: Any
    ) -> str | None:
        if backend == "xla" and (self.metadata.runtime_dtype or x.dtype) == torch.float64:
            return "TPUs and jax, as torch_xla calls it, have no float64"
        if backend == "cpu":
            return cpu.supports(self.cast(x), dt, A, B, C, *args, **kwargs)
        if backend != "triton":
            return None
        from easytorch.kernels.ssm2 import triton_op

        return triton_op.supports(x, B, C, self.metadata.runtime_dtype)

    def forward_native(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = native.NO_LIMIT,
        initial_state: Tensor | None = None, segment_ids: Tensor | None = None,
    ) -> StateSpaceOutput:  # fmt: skip
        return self.run(native.ssm2, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_state, segment_ids)
