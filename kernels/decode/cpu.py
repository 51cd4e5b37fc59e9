"""Decoding attention by the C++ operator: a key is read once for the heads that share it (cpu*.cpp here)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import cpp_call
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import library, processor
from easytorch.kernels.cpu.inference import DTYPES, last_dim_contiguous, refusal
from easytorch.kernels.decode.contract import Supports, resolve, without_dropout
from easytorch.kernels.interop.torch_func import as_given

_FLOATS = frozenset(DTYPES)


def supports(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> str | None:
    """None when `decode` carries this call, else the reason. Asking may build the library."""
    return without_dropout(features) or cpp_call.refusal(query, key, value, features)


def prefers(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> bool:
    """True where `decode` is faster than ATen and carries this call of one query. It may build the library."""
    shape = query.shape
    return (
        len(shape) == 4
        and shape[1] == 1
        and key.dim() == 4
        and processor.AVX2  # where it was measured
        and query.is_cpu
        # `supports`, inlined: the dispatch asks it of each token
        and features.get("dropout_prob", 0.0) <= 0.0
        and query.dtype is not torch.float64
        and refusal((query, key, value, features.get("bias"), features.get("sinks"))) is None
    )


def decode(query: Tensor, key: Tensor, value: Tensor, *, lengths: Tensor | None = None, **features: Any) -> Tensor:
    """(B, 1, H, D), (B, S, K, D), (B, S, K, Dv), lengths (B,) -> (B, 1, H, Dv) in the query's dtype.

    Raises `NotImplementedError` with the reason where `supports` gives one, `ValueError` for a length beyond 0..S.
    """
    return _resolved(query, key, value, lengths, supports, features)


def preferred(
    query: Tensor, key: Tensor, value: Tensor, *, lengths: Tensor | None = None, **features: Any
) -> Tensor:  # fmt: skip
    """`decode` of a call that `prefers` accepted: `supports` is not asked again."""
    return _resolved(query, key, value, lengths, None, features)


def _resolved(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, asked: Supports | None, features: dict[str, Any]
) -> Tensor:
    call = resolve(query, key, value, lengths, supports=asked, **features)
    return run(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), lengths, call, library.BEST)


def run(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, call: AttentionCall, level: int
) -> Tensor:  # fmt: skip
    """query (B, H, 1, D), key (B, K, S, D), value (B, K, S, Dv) -> (B, 1, H, Dv) of a resolved call."""
    call = cpp_call.with_segments_as_mask(call)
    output: Tensor = torch.ops.easytorch_cpu.decode.default(
        query,
        last_dim_contiguous(key),
        last_dim_contiguous(value),
        None if lengths is None else lengths.to(torch.int64),
        *cpp_call.arguments(call),
        level,
    )
    return output


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True where `one_token` may be called right away, for a `contract.plain_token`. It may build the library."""
    # the checks of `inference.refusal` for plain tensors: this runs at each layer of each token
    return (
        query.dtype in _FLOATS
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        and as_given()
        and library.missing() is None
    )


def one_token(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query (B, H, 1, D), key (B, K, S, D), value (B, K, S, Dv) -> (B, 1, H, Dv): `run` of a call without features."""
    output: Tensor = torch.ops.easytorch_cpu.decode.default(
        query, key, value, None, *cpp_call.NO_TENSORS, scale, *cpp_call.NO_NUMBERS, library.BEST
    )
    return output
