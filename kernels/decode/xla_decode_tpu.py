"""tpu_decode.py inside a torch_xla graph: one node, forward only."""

from __future__ import annotations

from typing import Any

from torch import Tensor, float64, int32

from easytorch.kernels.attention.contract import band_of
from easytorch.kernels.decode.contract import check_decode
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


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    query_segment_ids: Tensor | None = None,
    key_segment_ids: Tensor | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    seed: int | Tensor | None = None,
) -> Tensor:
    """(B, 1, H, D), (B, S, K, D), (B, S, K, Dv), lengths (B,) -> (B, 1, H, Dv) in the query's dtype.

    A length beyond 0..S counts as the nearest of them. Raises `ValueError` for what `supports` refuses.
    """
    from easytorch.kernels.decode import tpu_decode
    from easytorch.kernels.interop.xla_bridge import call_jax

    dim = check_decode(
        query, key, value, lengths, mask=mask, bias=bias, query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids, softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
    )[4]  # fmt: skip
    if (reason := supports(query, key, value, bias=bias, sinks=sinks, dropout_prob=dropout_prob)) is not None:
        raise ValueError(f"xla decode: {reason}")
    left, _ = band_of(causal, sliding_window)  # the right side never ends before the query's own key, the last
    integers = [None if x is None else x.to(int32) for x in (lengths, query_segment_ids, key_segment_ids)]
    return call_jax(
        tpu_decode.decode, query, key, value, integers[0], mask, bias, *integers[1:], sinks,
        scale=dim**-0.5 if softmax_scale is None else float(softmax_scale), left=left,
        softcap=None if softcap is None else float(softcap),
    )  # fmt: skip
