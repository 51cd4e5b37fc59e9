"""`swiglu` and `geglu`: an activation of the gate times the other projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from easytorch.kernels.glu import native
from easytorch.operations.dispatch.impl import OperationImpl
from easytorch.operations.dispatch.registry import OperationRegistry


class _GatedLinearUnit(OperationImpl):
    """What the two share: their kernels' folder, their typical call, and what Triton supports of them."""

    folder = "glu"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = torch.empty(1, 1024, 14336, device="meta")
        return (x, x), {}

    def supports(self, backend: str, gate: Tensor, up: Tensor, *options: Any, **named: Any) -> str | None:
        if backend != "triton":
            return None
        from easytorch.kernels.glu import triton_op

        return triton_op.supports(gate, self.metadata.runtime_dtype)

    def run(self, kernel: Callable[..., Tensor], gate: Tensor, up: Tensor, *options: Any, **named: Any) -> Tensor:
        return kernel(self.cast(gate), self.cast(up), *options, **named)


@OperationRegistry.register
class SwiGLU(_GatedLinearUnit):
    """`swiglu(gate, up)`: silu(gate) * up, (..., N) and (..., N) -> (..., N)."""

    paths: ClassVar = {"cpu": "aten", "gpu": "triton"}

    @classmethod
    def get_impl_name(cls) -> str:
        return "swiglu"

    def forward_native(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.run(native.swiglu, gate, up)


@OperationRegistry.register
class GeGLU(_GatedLinearUnit):
    """`geglu(gate, up, approximate="none")`: gelu(gate) * up; approximate is "none" (exact) or "tanh"."""

    paths: ClassVar = {"cpu": "aten", "gpu": "triton"}

    @classmethod
    def get_impl_name(cls) -> str:
        return "geglu"

    def forward_native(self, gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
        return self.run(native.geglu, gate, up, approximate)
