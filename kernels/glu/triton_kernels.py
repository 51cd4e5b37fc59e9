"""The kernels of the gated linear units: one program per tile of rows and columns, each element read once.

ACTIVATION is "silu", "gelu" (by the error function) or "gelu_tanh".
"""

from __future__ import annotations

import triton
import triton.language as tl

from easytorch.kernels.interop.triton_math import tanh

INVERSE_SQRT_2 = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2_PI = tl.constexpr(0.3989422804014327)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """(activation of x, its derivative), float32."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(x)
        return x * share, share * (1.0 + x * (1.0 - share))
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * INVERSE_SQRT_2))
        return x * share, share + x * tl.exp(-0.5 * x * x) * INVERSE_SQRT_2_PI
    else:
        turned = tanh((x + x * x * x * CUBIC) * SQRT_2_OVER_PI)
        share = 0.5 * (1.0 + turned)
        slope = 0.5 * (1.0 - turned * turned) * (1.0 + x * x * 3.0 * CUBIC) * SQRT_2_OVER_PI
        return x * share, share + x * slope


@triton.jit
def _tile(ROWS, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(rows, columns, which of them are inside) of this program's tile; rows in 64 bits."""
    blocks = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return rows, columns, (rows < ROWS) & (columns < N)


@triton.jit
def glu_forward(
    gate, up, output, gate_stride, up_stride, ROWS, N,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fills output (ROWS, N), contiguous."""
    rows, columns, inside = _tile(ROWS, N, BLOCK_M, BLOCK_N)
    x = tl.load(gate + rows * gate_stride + columns, mask=inside, other=0.0)
    other = tl.load(up + rows * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    active, _ = _activate(x.to(tl.float32), ACTIVATION)
    product = active.to(x.dtype).to(tl.float32) * other
    tl.store(output + rows * N + columns, product.to(output.dtype.element_ty), mask=inside)


@triton.jit
def glu_backward(
    grad, gate, up, gate_grad, up_grad, grad_stride, gate_stride, up_stride, ROWS, N,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fills gate_grad and up_grad (ROWS, N), contiguous; the activation is computed again, not kept."""
    rows, columns, inside = _tile(ROWS, N, BLOCK_M, BLOCK_N)
    upstream = tl.load(grad + rows * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + rows * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + rows * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    active, slope = _activate(x, ACTIVATION)
    at = rows * N + columns
    tl.store(gate_grad + at, (upstream * other * slope).to(gate_grad.dtype.element_ty), mask=inside)
    tl.store(up_grad + at, (upstream * active).to(up_grad.dtype.element_ty), mask=inside)
