"""Decoding attention by ATen: the query heads that share a key/value head become the rows of one matrix.

ATen's fused CPU kernel reads a key once for each matrix it is given: as (B, K, H / K, D) instead of (B, H, 1, D) the
cache is read once instead of H / K times, and the products have rows to share the work. Two other ways, both without a
gradient, stand beside it: aten_products.py, which also carries what the kernel lacks, and aten_split.py. Medians in ms
on 2 cores (EPYC Zen 4, AVX-512), torch 2.13, B8 H32 K8 S4096 D128, keys as (B, S, K, D) / as a transposed (B, K, S, D):

                   SDPA, enable_gqa   folded      products    split
    float32        48  / 41           25  / 22    25  / 16    24 / 23
    bfloat16       232 / 128          22  / 14    29  / 26    18 / 17
    float16        236 / 187          87  / 51    21  / 23

Reading keys and values takes 8 ms in float32 and 4 in bfloat16. Smaller caches of K8 D128, as (B, S, K, D):

    float32   B1 S4096                6.9         2.9         3.1
    float32   B8 S512                 3.3         2.6         3.9
    bfloat16  B1 S4096                30          3.0                     2.0
    bfloat16  B1 S2048                14          1.3                     0.8
    bfloat16  B8 S1024                55          4.7                      4.7
    float16   B1 S1024                6.8         1.9         1.2
    float16   B1 S256                 1.6         0.43        0.28
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.aten import addend
from easytorch.kernels.attention.aten_fused import fused
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import check_tensors, only_band
from easytorch.kernels.attention.layout import four_dims, readable
from easytorch.kernels.attention.native import attend, working_dtype
from easytorch.kernels.decode import native
from easytorch.kernels.decode.aten_products import attend_products
from easytorch.kernels.decode.aten_split import attend_split
from easytorch.kernels.decode.contract import resolve, without_dropout
from easytorch.kernels.interop.torch_func import recording, transforming

_LARGE = 2**18  # elements of a cache below which aten_products.py and aten_split.py cost more than they save


def supports(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> str | None:
    """None, or the part of the call that is not supported."""
    return without_dropout(features)


def decode(query: Tensor, key: Tensor, value: Tensor, *, lengths: Tensor | None = None, **features: Any) -> Tensor:
    """(B, 1, H, D), (B, S, K, D), (B, S, K, Dv), lengths (B,) -> (B, 1, H, Dv) in the query's dtype; differentiable.

    Raises `NotImplementedError` with the reason where `supports` gives one, `ValueError` for a length beyond 0..S.
    """
    softmax_scale = features.get("softmax_scale")
    if (
        lengths is None
        and only_band(features)
        and features.get("sliding_window") is None
        and not torch.compiler.is_compiling()
    ):  # as of most tokens that are generated: a record takes as long as the attention of a short cache
        check_tensors(query, key, value)
        if key.shape[1] > 0 and query.shape[1] == 1 and key.numel() < _LARGE:
            return _fused(query, key, value, None, softmax_scale, False)
    call = resolve(query, key, value, lengths, supports=supports, **features)
    batch, keys = key.shape[:2]
    unreadable = torch.compiler.is_compiling() or transforming()
    if lengths is not None and unreadable:
        return native.over_lengths(query, key, value, lengths, call)
    call = four_dims(call)
    free = not (unreadable or torch.is_autocast_enabled("cpu") or recording(query, key, value, call.bias, call.sinks))
    at_once = batch == 0 or _fuses(call) or unreadable or free
    if lengths is None and at_once:
        return _attend(query, key, value, keys, call, softmax_scale, free)
    ends = [keys] * batch if lengths is None else lengths.tolist()
    if at_once and len(set(ends)) <= 1:
        return _attend(query, key, value, ends[0] if ends else keys, call, softmax_scale, free)
    # one sequence at a time, so that only one has float32 keys and scores in memory
    return torch.cat([
        _attend(query[b : b + 1], key[b : b + 1], value[b : b + 1], end, _of_sequence(call, b), softmax_scale, free)
        for b, end in enumerate(ends)
    ])  # fmt: skip


def one_token(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor | None:
    """query (B, H, 1, D), key (B, K, S, D), value (B, K, S, Dv), as models and their caches hold them -> (B, 1, H, Dv).

    `decode` of a call without features whose tensors are a `contract.plain_token`, which generation makes at each layer
    of each token: over a short cache its steps take longer than the attention itself. None for a large cache.
    """
    if key.numel() >= _LARGE:
        return None
    (batch, heads, _, dim), kv_heads = query.shape, key.shape[1]
    rows = readable(query.reshape(batch, kv_heads, heads // kv_heads, dim))
    output = fused(rows, key, value, scale=scale)
    return output.reshape(batch, 1, heads, value.shape[3])


def _fuses(call: AttentionCall) -> bool:
    """ATen's kernel has neither a soft cap nor sinks."""
    return call.softcap is None and call.sinks is None


def _of_sequence(call: AttentionCall, b: int) -> AttentionCall:
    mask, bias, query_ids, key_ids = (
        tensor if tensor is None or tensor.shape[0] == 1 else tensor[b : b + 1]
        for tensor in (call.mask, call.bias, call.query_segment_ids, call.key_segment_ids)
    )
    return call._replace(mask=mask, bias=bias, query_segment_ids=query_ids, key_segment_ids=key_ids)


def _faster_by_products(key: Tensor) -> bool:
    """Caches in float16 without instructions for it, and the longest in float32 whose heads lie apart."""
    if key.dtype == torch.float16:
        return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported())
    _, keys, _, dim = key.shape
    return key.dtype == torch.float32 and keys >= 4096 and dim >= 128 and key.stride(1) == dim


def _faster_split(key: Tensor, value: Tensor) -> bool:
    """Long caches in bfloat16 where other heads lie between two keys of a head; keys and values of one dim."""
    _, keys, _, dim = key.shape
    if key.dtype != torch.bfloat16 or keys < 2048 or dim < 128 or key.stride(1) == dim:
        return False
    return value.shape[3] == dim and key.stride(3) == value.stride(3) == 1


def _attend(
    query: Tensor, key: Tensor, value: Tensor, end: int, call: AttentionCall, softmax_scale: float | None, free: bool
) -> Tensor:
    """The query is aligned with key end - 1 and sees the keys before it within the window. free: without a gradient.

    softmax_scale: as given, since ATen's own default may differ from ours by a rounding.
    """
    # the right side of the band ends at the query's own key or beyond: it sees the last
    start = 0 if call.left is None else max(0, end - 1 - call.left)
    if start > 0 or end < key.shape[1]:
        key, value, call = key[:, start:end], value[:, start:end], call.part(slice(None), slice(start, end))
    seen = call.mask
    if call.query_segment_ids is not None and call.key_segment_ids is not None:
        same = (call.query_segment_ids == call.key_segment_ids)[:, None, None]
        seen = same if seen is None else seen & same
    keys, kv_heads = key.shape[1], key.shape[2]
    large = free and key.numel() >= _LARGE
    if keys > 0 and ((free and not _fuses(call)) or (large and _faster_by_products(key))):
        return attend_products(query, key, value, call, seen=seen)
    if not _fuses(call) or keys == 0:
        return attend(query, key, value, call, seen=seen, keep=None, working=working_dtype(query))[0]
    attn_mask = _rows(seen, kv_heads)
    bias = _rows(call.bias, kv_heads)
    if bias is not None:
        bias = addend(bias, query)
        attn_mask = bias if attn_mask is None else torch.where(attn_mask, bias, float("-inf"))
    if attn_mask is not None and attn_mask.shape[3] != keys:
        attn_mask = attn_mask.expand(*attn_mask.shape[:3], keys)
    return _fused(query, key, value, attn_mask, softmax_scale, large)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, large: bool
) -> Tensor:
    """All keys by ATen's kernel, or by parts of a large cache."""
    batch, _, heads, dim = query.shape
    kv_heads = key.shape[2]
    rows = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    # as ATen reads them, and as a model's cache mostly lies: contiguous is sooner known than readable
    keys, values = key.transpose(1, 2), value.transpose(1, 2)
    rows, keys, values = readable(rows), readable(keys), readable(values)
    if large and _faster_split(key := keys.transpose(1, 2), value := values.transpose(1, 2)):
        output = attend_split(rows, key, value, attn_mask, dim**-0.5 if scale is None else scale)
    else:
        output = fused(rows, keys, values, attn_mask=attn_mask, scale=scale)
    return output.reshape(batch, 1, heads, value.shape[3])


def _rows(tensor: Tensor | None, kv_heads: int) -> Tensor | None:
    """(Bx, Hx, 1, Sx) -> (Bx, K, H / K, Sx), or (Bx, 1, 1, Sx) where the heads are alike."""
    if tensor is None or tensor.shape[1] == 1:
        return tensor
    return tensor.reshape(tensor.shape[0], kv_heads, tensor.shape[1] // kv_heads, tensor.shape[3])
