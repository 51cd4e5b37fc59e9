"""`linear`: x @ weight.T + bias, as `torch.nn.functional.linear`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.linear import cpu, native, onednn
from easytorch.kernels.linear.preference import prefers_cpu, prefers_onednn, smallest_weight
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.impl import Choice, OperationImpl
from easytorch.operations.dispatch.metadata import OperationMetadata
from easytorch.operations.dispatch.registry import OperationRegistry


@OperationRegistry.register
class Linear(OperationImpl):
    """(..., K), weight (N, K), bias (N,) -> (..., N). ATen; on a CPU for few rows the operator in C++, and oneDNN for
    float32 where torch's MKL is slower."""

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        self._few = Choice(self, "forward_cpp", "cpu", "cpu", "reads the weight of few rows at the speed of memory")
        self._small = Choice(self, "forward_gpu", "cpu", "aten", "MKL is as fast for a weight of this size")

    @classmethod
    def get_impl_name(cls) -> str:
        return "linear"

    def supports(self, backend: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
        if backend == "cpu":
            return cpu.supports(*self._cast(x, weight, bias))
        return onednn.supports(*self._cast(x, weight, bias)) if backend == "onednn" else None

    def emulates(self, backend: str, platform: str) -> bool:
        return backend == "aten" or super().emulates(backend, platform)

    def choose_freely(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        if platform != "cpu":
            return super().choose_freely(platform, args, kwargs)
        if self.metadata.runtime_dtype is None:
            given = _named(*args, **kwargs)
            if prefers_cpu(given[0], given[1]) and cpu.takes(*given):
                return self._few
        if len(args) > 1 and args[1].numel() < smallest_weight() and not torch.compiler.is_compiling():
            return self._small  # too small for oneDNN in any call
        given = self._cast(*_named(*args, **kwargs))
        reason = onednn.supports(*given)
        if reason is None:
            if prefers_onednn(given[0], given[1], recording(*given)):
                return Choice(self, "forward_cpu", platform, "onednn", "faster than MKL for this CPU and size")
            reason = "MKL is as fast for this CPU and size"
        return Choice(self, "forward_gpu", platform, "aten", reason)

    def forward_native(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return native.linear(*self._cast(x, weight, bias))

    @backend("onednn")
    def forward_cpu(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return onednn.linear(*self._cast(x, weight, bias))

    @backend("cpu")
    def forward_cpp(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return cpu.linear(*self._cast(x, weight, bias))

    @backend("aten")
    def forward_gpu(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x, weight, bias = self._cast(x, weight, bias)
        native.check_tensors(x, weight, bias)
        return F.linear(x, weight, bias)

    @backend("aten")
    def forward_tpu(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.forward_gpu(x, weight, bias)

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, weight = (torch.empty(shape, device="meta") for shape in ((256, 4096), (4096, 4096)))
        return (x, weight), {}

    def _cast(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.metadata.runtime_dtype is None:
            return x, weight, bias
        return self.cast(x), self.cast(weight), None if bias is None else self.cast(bias)


def _named(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return x, weight, bias
