"""Functions that Triton's language lacks. Imports Triton: import it from kernels only."""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def tanh(x):
    """Correct to float32: the quotient cancels near zero, where five terms of the series are exact enough."""
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - decay) / (1.0 + decay)
    y = x * x
    near = x + x * y * (-0.333333333 + y * (0.133333333 + y * (-0.0539682540 + y * 0.0218694885)))
    return tl.where(y < 0.0625, near, tl.where(x < 0.0, -far, far))
