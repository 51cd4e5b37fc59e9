"""Where XLA's online softmax stands in the CPU's order of preference, and the measurements behind it.

A call into jax costs about 0.3 ms there and back, and every new shape a compilation of about 0.5 s: below `MIN_ROWS`
query rows (decoding, short prompts of ever new lengths) ATen and the definition are ahead whatever the features.
"""

from __future__ import annotations

from torch import Tensor

MIN_ROWS = 128

Preferences = tuple[tuple[str, str], ...]

_ATEN = ("sdpa", "ATen's fused CPU kernel, the fastest measured for this call")
SMALL: Preferences = (_ATEN,)
LARGE: Preferences = (_ATEN, ("flash", "online softmax in XLA carries what ATen lacks"))


def preferences(query: Tensor) -> Preferences:
    """(implementation, why) in the order to ask; the definition comes after them."""
    return SMALL if query.dim() != 4 or query.shape[1] < MIN_ROWS else LARGE
