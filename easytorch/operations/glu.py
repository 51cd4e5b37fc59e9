"""`swiglu` and `geglu`: an activation of the gate times the other projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.glu import aten, native
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.impl import OperationImpl
from easytorch.operations.dispatch.registry import OperationRegistry


class _GatedLinearUnit(OperationImpl):
    """What the two share: their typical call, and what Triton carries of them."""

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = torch.empty(1, 1024, 14336, device="meta")
        return (x, x), {}

    def supports(self, backend: str, gate: Tensor, up: Tensor, *options: Any, **named: Any) -> str | None:
        if backend != "triton":
            return None
        from easytorch.kernels.glu import triton_op

        return triton_op.supports(gate, self.metadata.runtime_dtype)


@OperationRegistry.register
class SwiGLU(_GatedLinearUnit):
    """`swiglu(gate, up)`: silu(gate) * up, (..., N) and (..., N) -> (..., N)."""

    @classmethod
    def get_impl_name(cls) -> str:
        return "swiglu"

    def forward_native(self, gate: Tensor, up: Tensor) -> Tensor:
        return native.swiglu(self.cast(gate), self.cast(up))

    @backend("aten")
    def forward_cpu(self, gate: Tensor, up: Tensor) -> Tensor:
        return aten.swiglu(self.cast(gate), self.cast(up))

    @backend("triton")
    def forward_gpu(self, gate: Tensor, up: Tensor) -> Tensor:
        from easytorch.kernels.glu import triton_op

        return triton_op.swiglu(self.cast(gate), self.cast(up))


@OperationRegistry.register
class GeGLU(_GatedLinearUnit):
    """`geglu(gate, up, approximate="none")`: gelu(gate) * up; approximate is "none" (exact) or "tanh"."""

    @classmethod
    def get_impl_name(cls) -> str:
        return "geglu"

    def forward_native(self, gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
        return native.geglu(self.cast(gate), self.cast(up), approximate)

    @backend("aten")
    def forward_cpu(self, gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
        return aten.geglu(self.cast(gate), self.cast(up), approximate)

    @backend("triton")
    def forward_gpu(self, gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
        from easytorch.kernels.glu import triton_op

        return triton_op.geglu(self.cast(gate), self.cast(up), approximate)
