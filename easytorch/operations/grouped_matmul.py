"""`grouped_matmul`: one matrix product per expert of a mixture, each on its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from easytorch.kernels.grouped_matmul import native
from easytorch.kernels.interop.installed import missing
from easytorch.kernels.interop.torch_func import REFUSAL, transforming
from easytorch.operations.dispatch.registry import OperationRegistry
from easytorch.operations.product import ProductImpl


@OperationRegistry.register
class GroupedMatmul(ProductImpl):
    """`grouped_matmul(x, weight, group_sizes, bias=None, *, transposed=False)`: x (M, K), its rows sorted by expert,
    weight (E, K, N) (transposed: (E, N, K)), group_sizes (E,) int32 or int64, bias (E, N) -> (M, N).

    Rows past the sum of the sizes give zeros. kernels/grouped_matmul/routing.py sorts by expert and combines.
    """

    paths: ClassVar = {"cpu": "aten", "gpu": "triton", "tpu": "pallas"}

    @classmethod
    def get_impl_name(cls) -> str:
        return "grouped_matmul"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, weight = torch.empty(4096, 2048, device="meta"), torch.empty(64, 2048, 1408, device="meta")
        return (x, weight, torch.empty(64, dtype=torch.int64, device="meta")), {}

    def supports(
        self, backend: str, x: Tensor, weight: Tensor, group_sizes: Tensor, bias: Tensor | None = None,
        *, transposed: bool = False,
    ) -> str | None:  # fmt: skip
        if backend != "native" and transforming():
            return REFUSAL
        if backend == "triton":
            from easytorch.kernels.grouped_matmul import triton_op

            return triton_op.supports(x, self.product_dtype(x))
        if backend == "pallas":
            wide = (self.product_dtype(x) or x.dtype) == torch.float64
            return "its kernels compute in 32 bits, got float64" if wide else missing("jax")
        return None

    def forward_native(
        self, x: Tensor, weight: Tensor, group_sizes: Tensor, bias: Tensor | None = None, *, transposed: bool = False
    ) -> Tensor:
        return self.run(native.grouped_matmul, x, weight, group_sizes, bias, transposed=transposed)

    def run(
        self, kernel: Callable[..., Tensor], x: Tensor, weight: Tensor, group_sizes: Tensor, bias: Tensor | None = None,
        *, transposed: bool = False,
    ) -> Tensor:  # fmt: skip
        x, weight, bias = self.in_product_dtype(x, weight, bias)
        return kernel(x, weight, group_sizes, bias, transposed=transposed)
