"""Shared by the operations on a matrix product: the dtype it is computed in."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.operations.dispatch.impl import OperationImpl


class ProductImpl(OperationImpl):
    """An operation that multiplies x by a weight."""

    def product_dtype(self, x: Tensor) -> torch.dtype | None:
        """The dtype of the product: `runtime_dtype`, else autocast's, as for F.linear; None for that of the inputs."""
        device = x.device.type
        if self.metadata.runtime_dtype is not None or device == "meta" or not torch.is_autocast_enabled(device):
            return self.metadata.runtime_dtype
        return torch.get_autocast_dtype(device)

    def in_product_dtype(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        dtype = self.product_dtype(x)
        if dtype is None:
            return x, weight, bias
        return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
