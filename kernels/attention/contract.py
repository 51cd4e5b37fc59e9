"""The arguments every attention kernel takes, checked and brought to one record (call.py).

    attention(query, key, value, *, mask, bias, causal, query_segment_ids, key_segment_ids, sliding_window, softcap,
              sinks, softmax_scale, dropout_prob, seed)

Legend: B batch, T query length, S key length, H query heads, K key/value heads (H a multiple of K), D head_dim of query
and key, Dv head_dim of value. query (B, T, H, D), key (B, S, K, D), value (B, S, K, Dv) -> output (B, T, H, Dv).

    scores = softmax_scale * query @ key^T                      query head h reads key head h // (H / K)
    scores = softcap * tanh(scores / softcap)                   when softcap is given
    scores = scores + bias                                      bias broadcasts to (B, H, T, S)
    position i of T sees position j of S where all of these hold
        mask[b, h, i, j]                                        boolean, True attends, broadcasts to (B, H, T, S)
        j <= i + S - T                                          when causal: aligned to the last query and key
        query_segment_ids[b, i] == key_segment_ids[b, j]
        i + S - T - left <= j <= i + S - T + right              sliding_window (left, right); int w is (w - 1, w - 1)
    weights = softmax over j of scores, and of sinks[h] as one more logit that takes weight and carries no value
    weights = weights * keep / (1 - dropout_prob)               keep: see dropout.py
A row that sees nothing gives zeros.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.dropout import draw_seed
from easytorch.kernels.interop import arguments
from easytorch.kernels.interop.arguments import (
    FLOATS,
    LARGEST,
    check_integer,
    check_number,
    described,
    floating,
    is_integer,
    python_integer,
    together,
)
from easytorch.kernels.interop.torch_func import eager
from easytorch.kernels.random.counter import LOW

Window = tuple[int | None, int | None]

# Elements up to which a band is cached: 64 bands take 4 MB at most. Building one takes 30 us, twice the time of a small
# attention.
KEPT = 2**16
_FARTHEST = 2**30
SMALLEST_CAP = torch.finfo(torch.float32).tiny


def check_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[int, int, int, int, int, int, int]:
    """(B, T, S, H, K, D, Dv) of a call, or an error that names the tensor that does not fit."""
    if not (together(query, key) and together(query, value)):
        arguments.check_tensors("attention", query=query, key=key, value=value)
    q, k, v = query.shape, key.shape, value.shape
    if len(q) != 4 or len(k) != 4 or len(v) != 4:
        raise ValueError(f"attention takes (batch, seq, heads, head_dim) tensors, got {_shapes(query, key, value)}")
    batch, length, heads, dim = q
    keys, kv_heads, value_dim = k[1], k[2], v[3]
    if k[0] != batch or v[0] != batch or v[1] != keys or v[2] != kv_heads or k[3] != dim:
        raise ValueError(
            f"attention: batch, key length, key/value heads or head_dim differ: {_shapes(query, key, value)}; expected "
            f"query (B, T, H, D), key (B, S, K, D), value (B, S, K, Dv)"
        )
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(f"attention: the {heads} query heads are not a multiple of the {kv_heads} key/value heads")
    dtype = query.dtype
    if dtype != key.dtype or dtype != value.dtype or dtype not in FLOATS:
        raise ValueError(
            f"attention: query, key, value must be floating, of one dtype, got {dtype}, {key.dtype}, {value.dtype}"
        )
    if dim == 0:
        raise ValueError(f"attention: head_dim must be at least 1, got {_shapes(query, key, value)}")
    return batch, length, keys, heads, kv_heads, dim, value_dim


def resolve(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    query_segment_ids: torch.Tensor | None = None,
    key_segment_ids: torch.Tensor | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    seed: int | torch.Tensor | None = None,
    draw: bool = True,
    columns: int | None = None,
) -> AttentionCall:
    """The call as one record, or an error that names the argument that does not fit.

    draw: whether to draw a seed for dropout without one. columns: the number of keys that mask and bias span, where
    `key` holds only a part of them.
    """
    dim = check_tensors(query, key, value)[5]
    absent = mask is bias is query_segment_ids is key_segment_ids is sinks is None
    if not absent or softcap is not None or dropout_prob != 0.0:
        _check_features(
            query, key.shape[1] if columns is None else columns, key.shape[1], mask, bias, query_segment_ids,
            key_segment_ids, softcap, sinks, dropout_prob,
        )  # fmt: skip
    if query_segment_ids is not None and key_segment_ids is not None:
        query_segment_ids, key_segment_ids = _of_one_dtype(query_segment_ids, key_segment_ids)
    left, right = band_of(causal, sliding_window)
    if dropout_prob == 0.0:
        seed = None
    elif seed is not None:
        seed = _seed_of(seed)
    elif draw:
        seed = draw_seed()
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    return AttentionCall(
        mask, bias, query_segment_ids, key_segment_ids, sinks, seed, scale, left, right, softcap, dropout_prob
    )


resolve.__qualname__ = "attention"  # the name in TypeErrors: whoever gives a wrong keyword called attention


FEATURES = frozenset(inspect.getfullargspec(resolve).kwonlyargs) - {"draw", "columns"}
_OF_BAND = frozenset(("causal", "sliding_window", "softmax_scale"))


def only_band(features: Mapping[str, Any]) -> bool:
    """Whether a call has a band and a scale alone, as most have: a record takes as long as a small product.

    False for a name that is no feature, which `resolve` refuses.
    """
    if not features.keys() <= FEATURES:
        return False
    for name, value in features.items():
        if value is not None and name not in _OF_BAND and (name != "dropout_prob" or value != 0.0):
            return False
    return True


def _of_one_dtype(query_ids: torch.Tensor, key_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Segment ids as kernels compare them: of one dtype, and one that has every operation on integers."""
    if query_ids.dtype == key_ids.dtype and query_ids.dtype in (torch.int32, torch.int64):
        return query_ids, key_ids
    return query_ids.to(torch.int64), key_ids.to(torch.int64)


def _seed_of(seed: int | torch.Tensor) -> torch.Tensor:
    """int64, shape (); of a number the 32 bits that are used."""
    if isinstance(seed, torch.Tensor):
        return seed.to(torch.int64).reshape(())
    return torch.as_tensor(python_integer(seed) & LOW, dtype=torch.int64)


def _check_features(
    query: torch.Tensor, columns: int, keys: int, mask: torch.Tensor | None, bias: torch.Tensor | None,
    query_segment_ids: torch.Tensor | None, key_segment_ids: torch.Tensor | None, softcap: float | None,
    sinks: torch.Tensor | None, dropout_prob: float,
) -> None:  # fmt: skip
    batch, length, heads = query.shape[:3]
    if not (mask is bias is query_segment_ids is key_segment_ids is sinks is None):
        arguments.check_tensors(
            "attention", query=query, mask=mask, bias=bias, query_segment_ids=query_segment_ids,
            key_segment_ids=key_segment_ids, sinks=sinks,
        )  # fmt: skip
        arguments.check_dense(
            "attention", mask=mask, bias=bias, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids,
            sinks=sinks,
        )  # fmt: skip
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"attention: mask must be boolean (True attends), got {mask.dtype}; pass scores as bias")
        _check_broadcast("mask", mask, (batch, heads, length, columns))
    if bias is not None:
        if not floating(bias):
            raise ValueError(f"attention: bias must be floating, got {bias.dtype}; pass booleans as mask")
        _check_broadcast("bias", bias, (batch, heads, length, columns))
    if (query_segment_ids is None) != (key_segment_ids is None):
        raise ValueError("attention: query_segment_ids and key_segment_ids go together, got only one of them")
    if query_segment_ids is not None and key_segment_ids is not None:
        _check_shape("query_segment_ids", query_segment_ids, (batch, length))
        _check_shape("key_segment_ids", key_segment_ids, (batch, keys))
        for name, ids in (("query_segment_ids", query_segment_ids), ("key_segment_ids", key_segment_ids)):
            if ids.is_floating_point() or ids.is_complex():
                raise ValueError(f"attention: {name} must be integers, got {ids.dtype}")
    check_sinks("attention", sinks, heads)
    check_softcap("attention", softcap)
    check_dropout(dropout_prob)


def check_sinks(operation: str, sinks: torch.Tensor | None, heads: int) -> None:
    """An error for sinks that are not one number a query head."""
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"{operation}: sinks must be {(heads,)}, got {tuple(sinks.shape)}")
    if sinks is not None and not floating(sinks):
        raise ValueError(f"{operation}: sinks must be floating, got {sinks.dtype}")


def check_softcap(operation: str, softcap: float | None) -> float | None:
    """A softcap as Python's float, or an error where it is not a positive number; None is none."""
    number = check_number(operation, "softcap", softcap)
    # the scores are divided by it and multiplied again, in float32
    if number is not None and not SMALLEST_CAP <= number <= LARGEST:
        raise ValueError(
            f"{operation}: softcap must be positive and finite in float32, got {softcap}; None means no cap"
        )
    return number


def check_dropout(dropout_prob: float) -> float:
    """A probability as Python's float, or an error where it is outside [0, 1)."""
    number = dropout_prob
    if type(dropout_prob) is not float:
        number = check_number("attention", "dropout_prob", dropout_prob)
    if number is None or not 0.0 <= number < 1.0:
        raise ValueError(f"attention: dropout_prob must be in [0, 1), got {dropout_prob}")
    return number


def check_seed(seed: int | torch.Tensor | None) -> None:
    """An error for a seed that is invalid for any tensors."""
    if not isinstance(seed, torch.Tensor):
        check_integer("attention", "seed", seed)
    elif seed.numel() != 1 or seed.is_floating_point() or seed.is_complex() or seed.dtype == torch.bool:
        raise ValueError(f"attention: seed must hold one integer, got {seed.dtype} {tuple(seed.shape)}")
    elif seed.device.type == "meta":
        raise ValueError("attention: seed is on meta, which holds no number; move it to the CPU")


def window_of(sliding_window: int | tuple[int | None, int | None] | None) -> Window:
    """(left, right), None meaning unbounded on that side. -1 is accepted for None, as in flash-attn."""
    if sliding_window is None:
        return None, None
    if not isinstance(sliding_window, tuple) and is_integer(sliding_window):
        if sliding_window < 1:
            raise ValueError(f"attention: sliding_window must be at least 1, got {sliding_window}")
        width = python_integer(sliding_window)
        return _bounded(width - 1), _bounded(width - 1)
    sides = sliding_window if isinstance(sliding_window, tuple | list) else ()
    if len(sides) != 2 or not all(side is None or is_integer(side) for side in sides):
        raise TypeError(
            f"attention: sliding_window must be an integer, or a pair (left, right) of integers or None, got "
            f"{described(sliding_window)}"
        )
    left, right = (None if side is None or side == -1 else python_integer(side) for side in sides)
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(f"attention: sliding_window sides must be None, -1 or at least 0, got {sliding_window}")
    return _bounded(left), _bounded(right)


def _bounded(side: int | None) -> int | None:
    """A side beyond any sequence is None: the kernels hold positions in 32 bits."""
    return None if isinstance(side, int) and side >= _FARTHEST else side


def band_of(causal: bool, sliding_window: int | tuple[int | None, int | None] | None) -> Window:
    """(left, right) of causal and sliding window together: i + S - T - left <= j <= i + S - T + right."""
    if sliding_window is None:
        return None, 0 if causal else None
    left, right = window_of(sliding_window)
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def visible(
    call: AttentionCall, length: int, keys: int, device: torch.device, *, shift: int | None = None
) -> torch.Tensor | None:
    """Boolean, broadcastable to (B, H, T, S): which key each query sees; None when every key is seen.

    Query i is aligned with key i + shift: S - T by default; given for a block of a larger matrix.
    """
    seen = call.mask
    if call.left is not None or call.right is not None:
        shift = keys - length if shift is None else shift
        if keeps(length, keys, device):
            band = _kept_band(length, keys, call.left, call.right, shift)
        else:
            band = _band(length, keys, call.left, call.right, shift, device)
        seen = band if seen is None else seen & band
    if call.query_segment_ids is not None and call.key_segment_ids is not None:
        same = call.query_segment_ids.unsqueeze(1).unsqueeze(3) == call.key_segment_ids.unsqueeze(1).unsqueeze(2)
        seen = same if seen is None else seen & same
    return seen


def keeps(length: int, keys: int, device: torch.device) -> bool:
    """Whether a band (T, S) is cached: only small ones on the CPU, as CUDA graphs own the memory they capture."""
    return device.type == "cpu" and eager() and length * keys <= KEPT


@functools.lru_cache(maxsize=64)
def kept_scores(length: int, keys: int, left: int | None, right: int | None, dtype: torch.dtype) -> torch.Tensor:
    """(T, S) of `dtype` on the CPU, read-only: 0 in the band and -inf elsewhere, which ATen would otherwise compute
    from a boolean mask at each call."""
    with torch.inference_mode(False):  # one made there could not be saved for a gradient later
        hidden = ~_kept_band(length, keys, left, right, keys - length)
        return torch.zeros(length, keys, dtype=dtype, device="cpu").masked_fill_(hidden, float("-inf"))


@functools.lru_cache(maxsize=64)
def _kept_band(length: int, keys: int, left: int | None, right: int | None, shift: int) -> torch.Tensor:
    """`_band` on the CPU, cached and read-only."""
    with torch.inference_mode(False):
        return _band(length, keys, left, right, shift, torch.device("cpu"))


def _band(
    length: int, keys: int, left: int | None, right: int | None, shift: int, device: torch.device
) -> torch.Tensor:
    own = torch.arange(length, device=device)[:, None] + shift
    offset = torch.arange(keys, device=device) - own
    band = torch.ones_like(offset, dtype=torch.bool)
    if left is not None:
        band.logical_and_(offset >= -left)
    if right is not None:
        band.logical_and_(offset <= right)
    return band


def _check_broadcast(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    given = tensor.shape
    # with ==: in a traced graph `in` does not recognize symbolic sizes
    if len(given) > len(shape) or any(a != 1 and a != b for a, b in zip(given[::-1], shape[::-1], strict=False)):
        raise ValueError(f"attention: {name} {tuple(given)} does not broadcast to (B, H, T, S) = {tuple(shape)}")


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"attention: {name} must be {tuple(shape)}, got {tuple(tensor.shape)}")


def _shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
