"""The layouts that BLAS and ATen's fused kernels read, and a copy for the others."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from easytorch.kernels.attention.call import AttentionCall


def readable(x: Tensor) -> Tensor:
    """x (..., N) itself, or a copy where its last dimension is strided or its rows lie across one another.

    ATen's fused CPU kernels take the address of a row and read N numbers from there, whatever the last stride is, and
    give the output the layout of the query. Expanded dimensions, of stride 0, are read as they are.
    """
    if is_compiling():
        return _readable_in_graph(x)
    if x.is_contiguous():
        return x
    strides = x.stride()
    if strides[-1] != 1:
        return x.contiguous()
    width = x.size(-1)
    for stride in strides[:-1]:  # not `all` of a generator: 0.7 us for a transposed tensor, 0.2 for a contiguous one
        if 0 < stride < width:
            return x.contiguous()
    return x


def _readable_in_graph(x: Tensor) -> Tensor:
    """The same while a graph is traced, where a stride may be symbolic: a contiguous tensor's raise no guard, and one
    of which nothing is known is taken to be readable."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    *strides, last = x.stride()
    width = x.size(-1)
    if guard_or_false(last != 1):
        return x.contiguous()
    for stride in strides:
        if guard_or_false(stride > 0) and guard_or_false(stride < width):
            return x.contiguous()
    return x


def four_dims(call: AttentionCall) -> AttentionCall:
    """The call with all four dimensions of its mask and bias."""
    if call.dense:
        return call._replace(mask=matrix_of(call.mask), bias=matrix_of(call.bias))
    return call


def matrix_of(tensor: Tensor | None) -> Tensor | None:
    """A tensor that broadcasts to (B, H, T, S), reshaped to four dimensions; None stays None."""
    if tensor is None or tensor.dim() == 4:  # a reshape to what it is takes 2 us
        return tensor
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
