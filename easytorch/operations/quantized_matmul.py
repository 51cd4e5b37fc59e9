"""`quantized_matmul`: a linear layer whose frozen weight has 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from easytorch.kernels.interop.installed import missing
from easytorch.kernels.interop.torch_func import REFUSAL, transforming
from easytorch.kernels.quantized_matmul import cpu, native
from easytorch.kernels.quantized_matmul.gguf_blocks import BLOCKS
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize
from easytorch.operations.dispatch.registry import OperationRegistry
from easytorch.operations.product import ProductImpl

__all__ = ["QuantizedMatmul", "QuantizedWeight", "quantize"]


@OperationRegistry.register
class QuantizedMatmul(ProductImpl):
    """`quantized_matmul(x, weight, bias=None)`: x (..., K), weight a `QuantizedWeight` of shape (N, K), bias (N,) ->
    (..., N) in x's dtype. Gradients go to x and bias; the weight is frozen. `quantize(weight, format)` makes one.
    """

    paths: ClassVar = {"cpu": "aten", "cpp": "cpu", "gpu": "triton", "tpu": "pallas"}
    cpp_reason = "reads the codes of few rows at the speed of memory"
    takes_sparse = True

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
        if backend == "cpu":
            return cpu.supports(x, weight, self.product_dtype(x))
        if backend in ("triton", "pallas") and isinstance(weight, QuantizedWeight) and weight.format in BLOCKS:
            return f"its kernels do not read llama.cpp's blocks, got {weight.format}"
        if backend == "triton":
            from easytorch.kernels.quantized_matmul import triton_op

            return triton_op.supports(x, self.product_dtype(x))
        if backend == "pallas":
            wide = (self.product_dtype(x) or x.dtype) == torch.float64
            return "its kernels compute in 32 bits, got float64" if wide else missing("jax")
        return None

    def prefers_cpp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return cpu.prefers(*args, **kwargs) and self.supports("cpu", *args, **kwargs) is None

    def forward_native(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        return self.run(native.quantized_matmul, x, weight, bias)

    def run(
        self, kernel: Callable[..., Tensor], x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None
    ) -> Tensor:
        dtype = self.product_dtype(x)
        return kernel(x if dtype is None else x.to(dtype), weight, bias)
