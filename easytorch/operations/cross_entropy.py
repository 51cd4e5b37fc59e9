"""`cross_entropy` of logits, and `fused_linear_cross_entropy` of the hidden states before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor

from easytorch.kernels.cross_entropy import aten, cpu, fused_linear, native, torch_xla_op
from easytorch.kernels.interop.torch_func import untraced
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.impl import OperationImpl
from easytorch.operations.dispatch.registry import OperationRegistry
from easytorch.operations.product import ProductImpl


class LossOptions(TypedDict, total=False):
    """The keywords of both; kernels/cross_entropy/native.py says what each means."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str


class FusedLossOptions(LossOptions, total=False):
    chunk_size: int | None


@OperationRegistry.register
class CrossEntropy(OperationImpl):
    """`cross_entropy(logits, labels, *, ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0,
    reduction="mean")`: (..., V) and (...) -> the loss, float32 whatever the logits' dtype or `runtime_dtype`.
    """

    paths: ClassVar = {"cpu": "aten", "cpp": "cpu", "gpu": "triton"}
    cpp_reason = "a row of logits is read once, and its gradient written once"

    @classmethod
    def get_impl_name(cls) -> str:
        return "cross_entropy"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.empty(1024, 32000, device="meta"), torch.empty(1024, dtype=torch.int64, device="meta")), {}

    def supports(self, backend: str, logits: Tensor, labels: Tensor, **options: Any) -> str | None:
        if backend == "aten":
            return aten.supports(options.get("softcap"), options.get("z_loss", 0.0))
        if backend == "cpu":
            return cpu.supports(self.cast(logits), labels)
        if backend == "triton":
            from easytorch.kernels.cross_entropy import triton_op

            return triton_op.supports(logits, self.metadata.runtime_dtype)
        return None

    def prefers_cpp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return cpu.prefers(*args, **kwargs) and self.supports("cpu", *args, **kwargs) is None

    def forward_native(self, logits: Tensor, labels: Tensor, **options: Unpack[LossOptions]) -> Tensor:
        return self.run(native.cross_entropy, logits, labels, **options)

    def run(self, kernel: Callable[..., Tensor], logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return kernel(self.cast(logits), labels, **options)


@OperationRegistry.register
class FusedLinearCrossEntropy(ProductImpl):
    """`fused_linear_cross_entropy(hidden, weight, labels, bias=None, *, ..., chunk_size=None)`: `cross_entropy` of
    hidden (..., D) @ weight (V, D).T + bias (V,), computed a chunk of rows at a time.
    """

    @classmethod
    def get_impl_name(cls) -> str:
        return "fused_linear_cross_entropy"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, weight = torch.empty(1024, 4096, device="meta"), torch.empty(32000, 4096, device="meta")
        return (hidden, weight, torch.empty(1024, dtype=torch.int64, device="meta")), {}

    def supports(
        self, backend: str, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
    ) -> str | None:
        if backend == "triton":
            from easytorch.kernels.cross_entropy import triton_op

            return triton_op.supports(hidden, self.product_dtype(hidden))
        return torch_xla_op.supports(hidden, self.product_dtype(hidden)) if backend == "xla" else None

    def definition(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *,
        chunk_size: int | None = None, **options: Unpack[LossOptions],
    ) -> Tensor:  # fmt: skip
        """Without `chunk_size`, which does not change the result."""
        hidden, weight, bias = self.in_product_dtype(hidden, weight, bias)
        return native.linear_cross_entropy(hidden, weight, labels, bias, **options)

    def forward_native(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None,
        **options: Unpack[FusedLossOptions],
    ) -> Tensor:  # fmt: skip
        if not self._casts_itself(hidden, weight, bias, options.get("reduction", "mean")):
            hidden, weight, bias = self.in_product_dtype(hidden, weight, bias)
        return fused_linear.fused_linear_cross_entropy(hidden, weight, labels, bias, **options)

    def _casts_itself(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, reduction: str) -> bool:
        """Whether autocast decides the dtype of the products, which the kernel asks itself: a weight that is cast here
        is kept for the backward pass, and its gradient rounded and widened again, each as large as the weight."""
        if not hidden.is_cpu or self.metadata.runtime_dtype is not None or not torch.is_autocast_enabled("cpu"):
            return False
        one_dtype = all(one is None or one.dtype is hidden.dtype for one in (weight, bias))
        return one_dtype and reduction != "none" and untraced()

    @backend("triton")
    def forward_gpu(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None,
        **options: Unpack[FusedLossOptions],
    ) -> Tensor:  # fmt: skip
        hidden, weight, bias = self.in_product_dtype(hidden, weight, bias)
        return fused_linear.fused_linear_cross_entropy(hidden, weight, labels, bias, **options, library="triton")

    @backend("xla")
    def forward_tpu(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None,
        **options: Unpack[FusedLossOptions],
    ) -> Tensor:  # fmt: skip
        hidden, weight, bias = self.in_product_dtype(hidden, weight, bias)
        return torch_xla_op.fused_linear_cross_entropy(hidden, weight, labels, bias, **options)
