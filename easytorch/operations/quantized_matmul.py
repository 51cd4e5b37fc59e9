"""`quantized_matmul`: a linear layer whose frozen weight has 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.interop.installed import missing
from easytorch.kernels.interop.torch_func import REFUSAL, transforming
from easytorch.kernels.quantized_matmul import aten, native
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.registry import OperationRegistry
from easytorch.operations.product import ProductImpl

__all__ = ["QuantizedMatmul", "QuantizedWeight", "quantize"]


@OperationRegistry.register
class QuantizedMatmul(ProductImpl):
    """`quantized_matmul(x, weight, bias=None)`: x (..., K), weight a `QuantizedWeight` of shape (N, K), bias (N,) ->
    (..., N) in x's dtype. Gradients go to x and bias; the weight is frozen. `quantize(weight, format)` makes one.
    """

    @classmethod
    def get_impl_name(cls) -> str:
        return "quantized_matmul"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        data = torch.empty(4096, 2048, dtype=torch.uint8, device="meta")
        weight = QuantizedWeight(data, torch.empty(4096, 32, device="meta"), None, "int4", (4096, 4096), 128)
        return (torch.empty(1, 4096, device="meta"), weight), {}

    def supports(self, backend: str, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> str | None:
        if backend != "native" and transforming():
            return REFUSAL
        if backend == "triton":
            from easytorch.kernels.quantized_matmul import triton_op

            return triton_op.supports(x, self.product_dtype(x))
        if backend == "pallas":
            wide = (self.product_dtype(x) or x.dtype) == torch.float64
            return "its kernels compute in 32 bits, got float64" if wide else missing("jax")
        return None

    def forward_native(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        return native.quantized_matmul(*self._prepare(x, weight, bias))

    @backend("aten")
    def forward_cpu(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        return aten.quantized_matmul(*self._prepare(x, weight, bias))

    @backend("triton")
    def forward_gpu(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        from easytorch.kernels.quantized_matmul import triton_op

        return triton_op.quantized_matmul(*self._prepare(x, weight, bias))

    @backend("pallas")
    def forward_tpu(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        from easytorch.kernels.quantized_matmul import torch_xla_op

        return torch_xla_op.quantized_matmul(*self._prepare(x, weight, bias))

    def _prepare(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None
    ) -> tuple[Tensor, QuantizedWeight, Tensor | None]:
        dtype = self.product_dtype(x)
        return x if dtype is None else x.to(dtype), weight, bias
