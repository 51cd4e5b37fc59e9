"""`swiglu` and `geglu`: an activation of the gate times the other projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.cpu import library
from easytorch.kernels.cpu.inference import last_dim_contiguous
from easytorch.kernels.glu import cpu, native
from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.repeated.steps import GIVEN, RESULT, Operator, Steps
from easytorch.operations.dispatch.impl import Choice, OperationImpl
from easytorch.operations.dispatch.registry import OperationRegistry


class _GatedLinearUnit(OperationImpl):
    """Shared by the two: their kernels' folder, their typical call, and what the backends support of them."""

    folder = "glu"
    unconditional = frozenset({"aten"})
    cpp_reason = "the activation and the product in one pass, and so are their gradients"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = torch.empty(1, 1024, 14336, device="meta")
        return (x, x), {}

    def supports(self, backend: str, gate: Tensor, up: Tensor, *options: Any, **named: Any) -> str | None:
        if backend == "cpu":
            return cpu.supports(self.cast(gate), self.cast(up))
        if backend != "triton":
            return None
        from easytorch.kernels.glu import triton_op

        return triton_op.supports(gate, self.metadata.runtime_dtype)

    def prefers_cpp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self.metadata.runtime_dtype is None and self._prefers(*args, **kwargs)

    def _prefers(self, gate: Tensor, up: Tensor) -> bool:
        return cpu.prefers(gate, up)

    def run(self, kernel: Callable[..., Tensor], gate: Tensor, up: Tensor, *options: Any, **named: Any) -> Tensor:
        return kernel(self.cast(gate), self.cast(up), *options, **named)


_TIMES_UP = Operator("aten::mul", (RESULT, GIVEN[1]), "Tensor")
_silu: Callable[[Tensor], Tensor] = torch._C._nn.silu  # F.silu without the Python around it


def _swiglu_by_aten(gate: Tensor, up: Tensor) -> Tensor:
    return _silu(gate) * up


def _shortcut_of_cpp(args: tuple[Tensor, ...], activation: int) -> Steps | None:
    if recording(*args) or any(last_dim_contiguous(one) is not one for one in args):
        return None
    operator = Operator("easytorch_cpu::glu", (*GIVEN[:2], activation, library.BEST))
    return Steps(lambda gate, up: cpu.run(gate, up, activation, library.BEST), (operator,))


@OperationRegistry.register
class SwiGLU(_GatedLinearUnit):
    """`swiglu(gate, up)`: silu(gate) * up, (..., N) and (..., N) -> (..., N)."""

    paths: ClassVar = {"cpu": "aten", "cpp": "cpu", "gpu": "triton"}

    @classmethod
    def get_impl_name(cls) -> str:
        return "swiglu"

    def forward_native(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.run(native.swiglu, gate, up)

    def shortcut(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        if choice.method == "forward_cpp":
            return _shortcut_of_cpp(args, cpu.SILU)
        if choice.backend != "aten":
            return None
        return Steps(_swiglu_by_aten, (Operator("aten::silu", GIVEN[:1]), _TIMES_UP))

    def run_cpp(self, gate: Tensor, up: Tensor) -> Tensor:
        return cpu.run(gate, up, cpu.SILU, library.BEST)

    def try_cpp(self, gate: Tensor, up: Tensor) -> Tensor | None:
        """The output of a call without settings if the C++ operator runs it, else None."""
        return cpu.run(gate, up, cpu.SILU, library.BEST) if cpu.prefers(gate, up) else None


@OperationRegistry.register
class GeGLU(_GatedLinearUnit):
    """`geglu(gate, up, approximate="none")`: gelu(gate) * up; approximate is "none" (exact) or "tanh"."""

    paths: ClassVar = {"cpu": "aten", "cpp": "cpu", "gpu": "triton"}

    @classmethod
    def get_impl_name(cls) -> str:
        return "geglu"

    def forward_native(self, gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
        return self.run(native.geglu, gate, up, approximate)

    def shortcut(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        approximate = kwargs.get("approximate", "none")
        if choice.method == "forward_cpp":
            return _shortcut_of_cpp(args, cpu.GELU[approximate])
        if choice.backend != "aten":
            return None
        return Steps(
            lambda gate, up: F.gelu(gate, approximate=approximate) * up,
            (Operator("aten::gelu", (GIVEN[0], approximate)), _TIMES_UP),
            switches={(F, "gelu"): torch._C._nn.gelu},
        )

    def try_cpp(self, gate: Tensor, up: Tensor, approximate: str) -> Tensor | None:
        """As that of `swiglu`."""
        activation = cpu.GELU[approximate]
        return cpu.run(gate, up, activation, library.BEST) if cpu.prefers(gate, up, activation) else None

    def _prefers(self, gate: Tensor, up: Tensor, approximate: str = "none") -> bool:
        return cpu.prefers(
            gate, up, cpu.GELU["tanh" if isinstance(approximate, str) and approximate == "tanh" else "none"]
        )
