"""The layouts that BLAS and ATen's fused kernels read, and a copy for the others."""

from __future__ import annotations

from torch import Tensor


def readable(x: Tensor) -> Tensor:
    """x (..., N) itself, or a copy where its last dimension is strided or its rows lie across one another.

    ATen's fused CPU kernels take the address of a row and read N numbers from there, whatever the last stride is, and
    give the output the layout of the query. Expanded dimensions, of stride 0, are read as they are.
    """
    if x.is_contiguous():
        return x
    *strides, last = x.stride()
    width = x.shape[-1]
    return x if last == 1 and all(stride >= width or stride == 0 for stride in strides) else x.contiguous()
