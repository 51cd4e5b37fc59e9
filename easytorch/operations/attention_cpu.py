"""The CPU's order of preference between ATen and XLA's online softmax, and the measurements behind it.

A call into jax costs about 0.3 ms there and back, and every new shape a compilation of about 0.7 s: below `MIN_ROWS`
query rows (decoding, short prompts of ever new lengths) ATen and the definition are ahead whatever the features. Above,
ATen comes first except where a row of `XLA_FIRST` fits the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

Preferences = tuple[tuple[str, str], ...]

MIN_ROWS = 128
_ATEN = ("sdpa", "ATen's fused CPU kernel, no slower than XLA for this call")
ATEN_ONLY: Preferences = (_ATEN,)
ATEN_FIRST: Preferences = (_ATEN, ("flash", "online softmax in XLA carries what ATen lacks"))


class Measured(NamedTuple):
    """Where XLA was ahead: from `min_rows` query rows on; CPU time of XLA / ATen, float32 and bfloat16."""

    min_rows: int
    ratios: tuple[float, float]

    @property
    def preferences(self) -> Preferences:
        why = "XLA measured at {:.2f} (float32) and {:.2f} (bfloat16) of ATen's time from {} rows".format(
            *self.ratios, self.min_rows
        )
        return ("flash", why), _ATEN


# EPYC with AVX-512, 2 cores, torch 2.13, jax 0.10.2; CPU time, because the machine was shared. At 1024 and 2048 rows,
# causal, the forward pass alone is a draw (0.97 to 0.98), which does not repay the compilation.
WINDOW = Measured(1024, (0.38, 0.26)).preferences  # causal, window 256: ATen computes the tiles outside the window too
TRAINING = Measured(1024, (0.83, 0.94)).preferences  # B1 H16 T1024 D64 causal, forward and backward
PREFILL = Measured(4096, (0.91, 0.86)).preferences  # B1 H32 K8 T4096 D128 causal


def preferences(query: Tensor, key: Tensor, value: Tensor, features: dict[str, Any]) -> Preferences:
    """(implementation, why) in the order to ask; the definition comes after them."""
    # an exported program should need nothing but ATen where it runs, and its lengths may be symbolic
    if torch.compiler.is_exporting() or query.dim() != 4 or key.dim() != 4:
        return ATEN_ONLY
    rows = query.shape[1]
    if rows < MIN_ROWS:
        return ATEN_ONLY
    if rows < 1024 or not features.get("causal") or query.dtype == torch.float64:
        return ATEN_FIRST
    window = features.get("sliding_window")
    left = window[0] if isinstance(window, tuple) else window
    if left is not None and 0 <= left <= key.shape[1] // 4:
        return WINDOW
    if features.get("mask") is not None or features.get("bias") is not None:
        return ATEN_FIRST
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return TRAINING
    return PREFILL if rows >= 4096 else ATEN_FIRST
