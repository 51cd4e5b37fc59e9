"""pallas_or_jax.py inside a torch_xla graph: one node, forward only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, float64, int32

from easytorch.kernels.decode.contract import forward_only, resolve
from easytorch.kernels.interop.installed import missing


def supports(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> str | None:
    """None when `decode` carries this call, else the reason."""
    if (reason := forward_only(query, key, value, features)) is not None:
        return reason
    if query.dtype == float64:
        return "it computes in float32, not float64"
    return missing("jax")


def decode(query: Tensor, key: Tensor, value: Tensor, *, lengths: Tensor | None = None, **features: Any) -> Tensor:
    """(B, 1, H, D), (B, S, K, D), (B, S, K, Dv), lengths (B,) -> (B, 1, H, Dv) in the query's dtype.

    Lengths are clamped to 0..S. Raises `NotImplementedError` for what `supports` refuses.
    """
    from easytorch.kernels.attention.torch_xla_call import call_jax_on
    from easytorch.kernels.decode import pallas_or_jax

    call = resolve(query, key, value, lengths, supports=supports, **features)
    return call_jax_on(pallas_or_jax.decode, call, query, key, value, None if lengths is None else lengths.to(int32))
