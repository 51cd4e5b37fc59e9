"""`linear`: x @ weight.T + bias, as `torch.nn.functional.linear`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.linear import cpu, native, onednn
from easytorch.kernels.linear.preference import prefers_onednn, smallest_weight
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.impl import Choice, OperationImpl
from easytorch.operations.dispatch.metadata import OperationMetadata
from easytorch.operations.dispatch.registry import OperationRegistry


@OperationRegistry.register
class Linear(OperationImpl):
    """(..., K), weight (N, K), bias (N,) -> (..., N). ATen; on a CPU for few rows the operator in C++, and oneDNN for
    float32 where torch's MKL is slower."""

    takes_sparse = True  # ATen multiplies those

    paths: ClassVar = {"cpu": "onednn", "cpp": "cpu"}

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        mkl = Choice(self, "forward_gpu", "cpu", "aten", "MKL is as fast for this CPU and size")
        self._small = (mkl,)
        self._large = (Choice(self, "forward_cpu", "cpu", "onednn", "faster than MKL for this CPU and size"), mkl)
        few = Choice(self, "forward_cpp", "cpu", "cpu", "reads the weight of few rows at the speed of memory")
        self._few = (few,)

    @classmethod
    def get_impl_name(cls) -> str:
        return "linear"

    def supports(self, backend: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
        if backend == "cpu":
            return cpu.supports(*self._cast(x, weight, bias))
        return onednn.supports(*self._cast(x, weight, bias)) if backend == "onednn" else None

    def emulates(self, backend: str, platform: str) -> bool:
        return backend == "aten" or super().emulates(backend, platform)

    def candidates(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Choice]:
        if platform != "cpu":
            return super().candidates(platform, args, kwargs)
        given = self._cast(*_named(*args, **kwargs))
        if cpu.prefers(*given):
            return self._few
        if given[1].numel() >= smallest_weight() and prefers_onednn(given[0], given[1], recording(*given)):
            return self._large
        return self._small

    def refusal_of(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        # `prefers` asked all that `supports` asks, and what makes the operator the faster one
        return None if choice is self._few[0] else super().refusal_of(choice, args, kwargs)

    def few_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """What a call without settings gives where its first candidate is the operator in C++; None elsewhere.

        For a model's layers, which ask at each token: the dispatch takes as long as a small product.
        """
        return cpu.run(x, weight, bias) if cpu.prefers(x, weight, bias) else None

    def forward_native(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.run(native.linear, x, weight, bias)

    def run(self, kernel: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernel(*self._cast(x, weight, bias))

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
