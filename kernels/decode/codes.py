"""Decoding attention over keys and values of one byte each, int8 or float8 with scales, and recent ones after them.

Legend as in kernels/attention/contract.py; key (B, K, S, D), value (B, K, S, Dv) are codes, as caches hold them. Number
d of a token and head is code * scale[..., d // group_size], rounded to the query's dtype, as in a `QuantizedWeight`.
Recent keys (B, K, R, D) and values, in the query's dtype, are the tokens S to S + R - 1. The operator in C++
(cpu_codes.cpp) decodes 16 keys of a head at a time, which stay in the L1 cache; no decoded copy of the cache is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.attention import cpp_call
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import library, processor
from easytorch.kernels.cpu.inference import DTYPES, last_dim_contiguous, other_dtype, refusal
from easytorch.kernels.decode import contract, native
from easytorch.kernels.decode.contract import without_dropout
from easytorch.kernels.quantized_matmul.formats import spread

CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class Codes(NamedTuple):
    """data (..., D) of a dtype of `CODES`; scale (..., ceil(D / group_size)), float32."""

    data: Tensor
    scale: Tensor
    group_size: int

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The numbers (..., D): computed in float32 (float64 for float64), rounded to `dtype`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        columns = self.data.shape[-1]
        scale = spread(self.scale.flatten(0, -2), self.group_size, columns).unflatten(0, self.scale.shape[:-1])
        return (self.data.to(wide) * scale.to(wide)).to(dtype)


def supports(query: Tensor, key: Codes, value: Codes, features: Mapping[str, Any]) -> str | None:
    """None when `decode` carries this call, else the reason. Asking may build the library."""
    if query.dtype not in DTYPES:
        return other_dtype(query.dtype)
    if key.data.dtype not in CODES or value.data.dtype != key.data.dtype or key.group_size != value.group_size:
        return f"it takes codes of one dtype of {', '.join(map(str, CODES))} and one group size"
    given = (query, *key[:2], *value[:2], features.get("bias"), features.get("sinks"))
    return without_dropout(features) or refusal(given, dtype=query.dtype)


def prefers(query: Tensor, key: Codes, value: Codes, features: Mapping[str, Any]) -> bool:
    """True where `decode` carries the call and the CPU is of the kind on which it was measured.

    Of decoding the cache and attending to that, B1 H32 K8 S4096 D128 and H16 S1024 D64, one thread of a loaded AMD EPYC
    (Zen 4): bfloat16 0.05 to 0.34, float32 0.03 to 0.45; of a cache in the query's dtype 0.5 to 1.5 and 0.8 to 1.4.
    """
    on_cpu = query.is_cpu and key.data.is_cpu and value.data.is_cpu
    return processor.AVX2 and on_cpu and supports(query, key, value, features) is None


def decode(
    query: Tensor, key: Codes, value: Codes, recent: tuple[Tensor, Tensor] | None = None,
    *, lengths: Tensor | None = None, **features: Any,
) -> Tensor:  # fmt: skip
    """query (B, H, 1, D), key and value (B, K, S, D or Dv), recent (B, K, R, D) and (B, K, R, Dv), lengths (B,) of
    0..S + R -> (B, 1, H, Dv) in the query's dtype.

    Raises `NotImplementedError` with the reason where `supports` gives one, `ValueError` for what does not fit.
    """
    call = resolve(query, key, value, recent, lengths, features)
    if (reason := supports(query, key, value, features)) is not None:
        raise NotImplementedError(f"decode: {reason}")
    return run(query, key, value, recent, lengths, call, library.BEST)


def define(
    query: Tensor, key: Codes, value: Codes, recent: tuple[Tensor, Tensor] | None = None,
    *, lengths: Tensor | None = None, **features: Any,
) -> Tensor:  # fmt: skip
    """The definition of `decode`: the codes decoded to the query's dtype, and native.py of all keys."""
    resolve(query, key, value, recent, lengths, features)
    keys, values = (codes.decoded(query.dtype) for codes in (key, value))
    if recent is not None:
        keys, values = torch.cat([keys, recent[0]], 2), torch.cat([values, recent[1]], 2)
    given = (x.transpose(1, 2) for x in (query, keys, values))
    return native.decode(*given, lengths=lengths, **features)


def check_scales(operation: str, key: Codes, value: Codes) -> None:
    """`ValueError` for codes that are not of four dimensions, or with scales that do not fit."""
    for name, codes in (("key", key), ("value", value)):
        groups = -(-codes.data.shape[-1] // codes.group_size) if codes.group_size > 0 else 0
        if codes.data.dim() != 4 or codes.scale.shape != (*codes.data.shape[:-1], groups):
            raise ValueError(
                f"{operation}: {name} codes are (.., .., .., D) with scales (.., .., .., D / {codes.group_size}), got "
                f"{tuple(codes.data.shape)} and {tuple(codes.scale.shape)}"
            )
        if codes.scale.dtype != torch.float32:
            raise ValueError(f"{operation}: {name} scales must be float32, got {codes.scale.dtype}")


def resolve(
    query: Tensor, key: Codes, value: Codes, recent: tuple[Tensor, Tensor] | None, lengths: Tensor | None,
    features: Mapping[str, Any],
) -> AttentionCall:  # fmt: skip
    """The call as one record, or an error that names what does not fit."""
    check_scales("decode", key, value)
    lengths_of = [0] if recent is None else [0, recent[0].shape[2]]
    for number, codes in enumerate((key, value)):
        expected = (*codes.data.shape[:2], lengths_of[-1], codes.data.shape[3])
        if recent is not None and (recent[number].shape != expected or recent[number].dtype != query.dtype):
            raise ValueError(
                f"decode: recent keys and values are {expected} in the query's {query.dtype}, got "
                f"{tuple(recent[number].shape)} in {recent[number].dtype}"
            )
    # stands for all keys, of which only the shape is looked at
    batch, kv_heads, coded, dim = key.data.shape
    keys, values = (
        query.new_empty(1).expand(batch, coded + lengths_of[-1], kv_heads, n) for n in (dim, value.data.shape[3])
    )
    if value.data.shape[:3] != key.data.shape[:3]:
        raise ValueError(f"decode: keys {tuple(key.data.shape)} and values {tuple(value.data.shape)} do not fit")
    return contract.resolve(query.transpose(1, 2), keys, values, lengths, **features)


def run(
    query: Tensor, key: Codes, value: Codes, recent: tuple[Tensor, Tensor] | None, lengths: Tensor | None,
    call: AttentionCall, level: int,
) -> Tensor:  # fmt: skip
    """`decode` of a resolved call that `supports` accepts; level: see library.LEVELS."""
    call = cpp_call.with_segments_as_mask(call)
    recent_key, recent_value = (None, None) if recent is None else map(last_dim_contiguous, recent)
    output: Tensor = torch.ops.easytorch_cpu.decode_codes.default(
        query,
        last_dim_contiguous(key.data),
        last_dim_contiguous(value.data),
        last_dim_contiguous(key.scale),
        last_dim_contiguous(value.scale),
        recent_key,
        recent_value,
        None if lengths is None else lengths.to(torch.int64),
        key.group_size,
        *cpp_call.arguments(call),
        level,
    )
    return output
