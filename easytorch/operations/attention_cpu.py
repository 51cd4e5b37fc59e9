"""The CPU's order of preference between ATen and XLA's online softmax, and the measurements behind it.

Medians on 2 idle cores (EPYC, AVX-512), torch 2.13, jax 0.10.2, float32 / bfloat16, B1 H16 D64 causal, XLA over ATen:

    1024 or 2048 rows, forward    1.9 / 1.8     XLA runs one key/value head at a time, so mostly on one core
    1024 rows, with backward      2.0 / 2.1
    1024 rows, window 256         0.78 / 0.81   ATen computes the tiles outside the window too
    2048 rows, window 512         0.53 / 0.53
    softcap, 128 to 1024 rows     0.04 to 0.14  against the definition, which is all there is besides

A call into jax costs about 0.25 ms there and back, and every new shape a compilation of about 0.7 s: below `MIN_ROWS`
query rows (decoding, short prompts of ever new lengths) ATen and the definition are ahead whatever the features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.operations.decode import ONE_QUERY

Preferences = tuple[tuple[str, str], ...]

MIN_ROWS = 128
MIN_WINDOW_ROWS = 1024

_ATEN = ("sdpa", "ATen's fused CPU kernel, the fastest measured for this call")
ATEN_ONLY: Preferences = (_ATEN,)
DECODE_FIRST: Preferences = (ONE_QUERY, _ATEN)
DECODE_LAST: Preferences = (_ATEN, ONE_QUERY)
ATEN_FIRST: Preferences = (_ATEN, ("flash", "online softmax in XLA carries what ATen lacks"))
XLA_FIRST: Preferences = (("flash", "XLA skips what lies outside the window, ATen does not"), _ATEN)


def preferences(query: Tensor, key: Tensor, value: Tensor, features: dict[str, Any]) -> Preferences:
    """(implementation, why) in the order to ask; the definition comes after them."""
    # an exported program should need nothing but ATen where it runs, and its lengths may be symbolic
    if torch.compiler.is_exporting() or query.dim() != 4 or key.dim() != 4:
        return ATEN_ONLY
    rows = query.shape[1]
    if rows == 1:  # heads that share no key/value head leave nothing to fold: ATen as it is
        return DECODE_FIRST if query.shape[2] > key.shape[2] else DECODE_LAST
    if rows < MIN_ROWS:
        return ATEN_ONLY
    window = features.get("sliding_window")
    if window is None or rows < MIN_WINDOW_ROWS or not features.get("causal") or query.dtype == torch.float64:
        return ATEN_FIRST
    left = window if isinstance(window, int) else window[0]
    return XLA_FIRST if left is not None and 0 <= left <= key.shape[1] // 4 else ATEN_FIRST
