"""Matrix products on a CPU by the faster of its libraries: float32 by oneDNN or MKL, 16 bits in float32 where needed.

On a CPU without instructions for products of a 16-bit dtype oneDNN widens numbers inside its loops, many times each.
Here each is widened once, a few rows of the larger matrix at a time, for a product in float32 that is rounded once.
Time of F.linear over it, two threads of an Intel Xeon without dot products of bfloat16, a weight (4096, 1024), torch
2.13:

    rows        17    64    256   1024
    bfloat16   2.3   2.4    3.1    4.2
    float16    6.0   7.8    8.6    9.4
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.cpu import processor
from easytorch.kernels.interop.torch_func import as_given, batched_by_autograd, recording

# Elements of a float32 weight from which oneDNN is asked, on AMD's CPUs. Time over MKL's, 1024 rows, one thread of an
# EPYC (Zen 4), torch 2.13:
#
#     weight (N, K)      (384, 384)  (1024, 384)  (2048, 384)  (384, 1024)  (32000, 384)
#     output               0.91         0.73         0.90         0.78         1.01; 256 rows 0.71, 512 rows 0.86
#     gradient of x        0.87         0.70         0.89         0.73         0.94
#     gradient of weight   1.10         1.04         0.93         0.98         1.36
ONEDNN_WEIGHT = 2**17
_ONEDNN = torch.backends.mkldnn.is_available() and processor.VENDOR == "AuthenticAMD"

# Rows of x and elements of a weight from which products in 16 bits are computed in float32: below, ATen has other ways.
LEAST_ROWS, SMALLEST_WIDENED = 8, 2**14
# Elements that are widened at once: 4 MiB stay in the caches.
AT_ONCE = 2**20
HALVES = (torch.bfloat16, torch.float16)
# The 16-bit dtypes that this CPU has no instructions to multiply.
WIDENED = frozenset(
    dtype
    for dtype, has in zip(HALVES, (processor.BFLOAT16_PRODUCTS, processor.FLOAT16_PRODUCTS), strict=True)
    if processor.AVX2 and not has
)
# The same for weights that are decoded and for experts, where float16 is widened on other kinds of CPUs too.
WIDENED_PARTS = WIDENED if processor.AVX2 else frozenset({torch.float16})
_PLAIN = (Tensor, torch.nn.Parameter)


def prefers_onednn(elements: int) -> bool:
    """Whether oneDNN is faster than MKL for a float32 weight of so many elements, in training."""
    return _ONEDNN and elements >= ONEDNN_WEIGHT and bool(torch.backends.mkldnn.enabled)


def widens(dtype: torch.dtype, rows: int, elements: int) -> bool:
    """Whether a product of that dtype and size is faster in float32 on this CPU."""
    return dtype in WIDENED and rows >= LEAST_ROWS and elements >= SMALLEST_WIDENED


def prefers_widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """True where `widened_linear` takes this call and is faster than `F.linear`: it records no gradient."""
    return (
        x.dtype in WIDENED
        and as_given()
        and x.is_cpu
        and x.dim() > 0
        and weight.dim() == 2
        and widens(x.dtype, x.numel() // max(x.shape[-1], 1), weight.numel())
        and x.shape[-1] == weight.shape[1]
        and _plain(weight, x)
        and type(x) in _PLAIN
        and x.layout is torch.strided
        and (bias is None or (_plain(bias, x) and bias.shape == weight.shape[:1]))
        and not recording(x, weight, bias)
    )


def _plain(tensor: Tensor, x: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.dtype is x.dtype and tensor.is_cpu and tensor.layout is torch.strided


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of a call that `prefers_widened` takes, in float32 and rounded once."""
    return _widened(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, in 16 bits the faster way on a CPU."""
    return widened_linear(x, weight, bias) if prefers_widened(x, weight, bias) else F.linear(x, weight, bias)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, output: Tensor | None = None) -> Tensor:
    """a (M, K) @ b.T + bias, b (N, K), bias (N,), on a CPU, in their one dtype, without gradients.

    output (M, N): memory that the product may be written to.
    """
    widened = widens(a.dtype, min(*a.shape, len(b)), max(a.numel(), b.numel()))
    if widened and not (batched_by_autograd(a) or batched_by_autograd(b)):
        return in_float32(a, b, bias, output)
    found = _product(a, b, output)
    return found if bias is None else found.add_(bias)


def in_float32(a: Tensor, b: Tensor, bias: Tensor | None = None, output: Tensor | None = None) -> Tensor:
    """`product` of 16 bits, whatever its size, in float32 and rounded once: autocast would narrow it again."""
    with torch.autocast("cpu", enabled=False):
        return _widened(a, b, bias, output)


def _product(a: Tensor, b: Tensor, output: Tensor | None = None) -> Tensor:
    if a.dtype is torch.float32 and prefers_onednn(b.numel()) and a.numel() and b.numel():
        found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
        return found
    return a @ b.t() if output is None else torch.mm(a, b.t(), out=output)


def _widened(a: Tensor, b: Tensor, bias: Tensor | None = None, output: Tensor | None = None) -> Tensor:
    """a (M, K) @ b.T + bias, b (N, K), bias (N,), in float32: blocks of whichever of M, N and K is the largest."""
    (m, inner), n = a.shape, len(b)
    added = None if bias is None else bias.float()
    output = a.new_empty(m, n) if output is None else output
    if inner >= max(m, n):
        total = None
        for part in _blocks(inner, max(m, n)):
            found = _product(_wide(a[:, part]), _wide(b[:, part]))
            total = found if total is None else total.add_(found)
        assert total is not None
        return output.copy_(total if added is None else total.add_(added))
    by_columns = n >= m
    whole = _wide(a if by_columns else b)
    for part in _blocks(max(m, n), inner):
        found = _product(whole, _wide(b[part])) if by_columns else _product(_wide(a[part]), whole)
        if added is not None:
            found += added[part] if by_columns else added
        (output[:, part] if by_columns else output[part]).copy_(found)
    return output


def _blocks(length: int, width: int) -> Iterator[slice]:
    """Parts of a dimension whose blocks of that width have `AT_ONCE` elements."""
    step = max(LEAST_ROWS, AT_ONCE // max(width, 1))
    for start in range(0, length, step):
        yield slice(start, start + step)


def _wide(rows: Tensor) -> Tensor:
    """In float32, in the order in which it lies: columns side by side stay so, which BLAS reads as well."""
    return rows.t().float().t() if rows.stride(0) == 1 else rows.float()
