"""`linear`: x @ weight.T + bias, as `torch.nn.functional.linear`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.cpu import library
from easytorch.kernels.cpu.inference import ABSENT
from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.linear import cpu, native, onednn, products
from easytorch.kernels.linear.preference import prefers_onednn, smallest_weight
from easytorch.kernels.repeated.steps import GIVEN, Operator, Steps
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
    cpp_reason = "reads the weight of few rows at the speed of memory"

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        onednn = Choice(self, "forward_cpu", "cpu", "onednn", "faster than MKL for this CPU and size")
        aten = Choice(self, "forward_gpu", "cpu", "aten", "MKL is as fast for this CPU and size", True)
        self._even = (aten,)
        self._small = (aten._replace(reason="MKL is as fast for a weight of this size"),)
        self._large = (onednn, aten._replace(reason="ATen's own product"))

    @classmethod
    def get_impl_name(cls) -> str:
        return "linear"

    def supports(self, backend: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
        if backend == "cpu":
            return cpu.supports(*self._cast(x, weight, bias))
        return onednn.supports(*self._cast(x, weight, bias)) if backend == "onednn" else None

    def emulates(self, backend: str, platform: str) -> bool:
        return backend == "aten" or super().emulates(backend, platform)

    def prefers_cpp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self.metadata.runtime_dtype is None and cpu.prefers(*args, **kwargs)

    def candidates(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Choice]:
        if platform != "cpu":
            return super().candidates(platform, args, kwargs)
        if self.prefers_cpp(args, kwargs):
            return self.cpp_choices
        given = _named(*args, **kwargs)
        if given[1].numel() < smallest_weight() or given[1].dim() != 2:
            return self._small
        x, weight, bias = self._cast(*given)
        # of another dtype oneDNN is asked all the same, for its reason
        ahead = x.dtype != torch.float32 or prefers_onednn(x, weight, recording(x, weight, bias))
        return self._large if ahead else self._even

    def run_cpp(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return cpu.run(x, weight, bias)

    def shortcut(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        if choice.method == "forward_cpp":
            return _shortcut_of_cpp(*args)
        # 16 bits may be multiplied otherwise where gradients are recorded
        if choice.backend != "aten" or args[0].dtype is not torch.float32 or not kwargs.keys() <= {"bias"}:
            return None
        given = (*GIVEN[: len(args)], *[None] * (3 - len(args)))
        unchanged = {(F, "linear"): torch._C._nn.linear}
        return Steps(_linear, (Operator("aten::linear", given),), switches=unchanged)

    def few_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The output of a call without settings if the C++ operator runs it, else None.

        For a model's layers, which ask at each token: the dispatch takes as long as a small product.
        """
        return cpu.run(x, weight, bias) if cpu.prefers(x, weight, bias) else None

    def argmax_of_few_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The argmax over the last dimension of what `few_rows` gives, which is not kept; None where it gives None."""
        return cpu.argmax(x, weight, bias) if cpu.prefers(x, weight, bias) and weight.shape[0] else None

    def forward_native(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.run(native.linear, x, weight, bias)

    def run(self, kernel: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernel(*self._cast(x, weight, bias))

    @backend("aten")
    def forward_gpu(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x, weight, bias = self._cast(x, weight, bias)
        native.check_tensors(x, weight, bias)
        return products.linear(x, weight, bias)

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


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def _shortcut_of_cpp(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Steps | None:
    if 0 in weight.shape or weight.stride(1) != 1 or (bias is not None and bias.stride(0) != 1):
        return None
    given = (*GIVEN[:2], ABSENT[x.dtype] if bias is None else GIVEN[2], library.BEST)
    return Steps(lambda x, weight, bias=None: cpu.run(x, weight, bias), (Operator("easytorch_cpu::linear", given),))


def _named(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return x, weight, bias
