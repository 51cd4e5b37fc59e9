"""pallas_or_jax.py inside a torch_xla graph: one node, forward only."""

from __future__ import annotations

from typing import Any

from torch import Tensor, float64, int32

from easytorch.kernels.decode.contract import resolve
from easytorch.kernels.interop.installed import missing
from easytorch.kernels.interop.torch_func import recording


def supports(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_prob: float = 0.0,
    **_: Any,
) -> str | None:
    """None when `decode` carries this call, else the reason. Takes the arguments of `decode`."""
    if dropout_prob > 0.0:
        return "it has no dropout"
    if recording(query, key, value, bias, sinks):
        return "it computes no gradients, and one is asked for"
    if query.dtype == float64:
        return "it computes in float32, not float64"
    return missing("jax")


def decode(query: Tensor, key: Tensor, value: Tensor, *, lengths: Tensor | None = None, **features: Any) -> Tensor:
    """(B, 1, H, D), (B, S, K, D), (B, S, K, Dv), lengths (B,) -> (B, 1, H, Dv) in the query's dtype.

    Lengths are clamped to 0..S. Raises `ValueError` for what `supports` refuses.
    """
    from easytorch.kernels.attention.torch_xla_call import call_jax_on
    from easytorch.kernels.decode import pallas_or_jax

    call = resolve(query, key, value, lengths, **features)
    if (reason := supports(query, key, value, **features)) is not None:
        raise ValueError(f"xla decode: {reason}")
    return call_jax_on(pallas_or_jax.decode, call, query, key, value, None if lengths is None else lengths.to(int32))
