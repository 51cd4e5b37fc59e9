"""The absorbed plan of few tokens by the C++ operator (cpu*.cpp here): a latent is read once for all heads and tokens,
and the projections before and after are of the same call. Inference only.

Time divided by ATen's (absorbed.py), one thread of a loaded Intel Xeon (Emerald Rapids, AVX-512 without dot products of
bfloat16), B1 T1 L512 R64 Dn128 Dv128:

    heads, keys    float32    bfloat16
    16, 512          0.94       0.21
    16, 2048         1.01       0.22
    16, 8192         0.91       0.22
    128, 512         1.09       0.24
    128, 2048        1.24       0.23
    128, 8192        1.38       0.22

With many heads the products are as large as those of a matrix, where MKL's in float32 are faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import contract, cpp_call
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import inference, library, processor
from easytorch.kernels.cpu.inference import DTYPES, last_dim_contiguous
from easytorch.kernels.multi_latent.contract import absorbs, check_tensors, default_scale

# Tokens up to which the operator is preferred, and queries, which are tokens times heads: any number of a dtype that is
# not named. ATen has a fast product of bfloat16 where the CPU has its dot products, on which this was not measured.
MOST_TOKENS = 16
MOST_QUERIES = {torch.float32: 32, **({torch.bfloat16: 32} if processor.BFLOAT16_PRODUCTS else {})}


def supports(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, up_key: Tensor | None = None,
    up_value: Tensor | None = None, **features: Any,
) -> str | None:  # fmt: skip
    """None when `multi_latent_attention` takes this call, else the reason. Asking may build the library."""
    if query.dtype not in DTYPES:
        return inference.other_dtype(query.dtype)
    if features.get("dropout_prob"):
        return "it has no dropout"
    if latent.shape[-1] == 0:
        return "it takes latents of at least one number"
    given = (query, query_rope, latent, key_rope, up_key, up_value, features.get("bias"), features.get("sinks"))
    return inference.refusal(given, dtype=query.dtype)


def prefers(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, up_key: Tensor | None = None,
    up_value: Tensor | None = None, **features: Any,
) -> bool:  # fmt: skip
    """True where the operator is faster than ATen and takes this call. It may build the library."""
    if query.dim() != 4 or latent.dim() != 3 or not 1 <= query.shape[1] <= MOST_TOKENS or not query.is_cpu:
        return False
    if not processor.AVX512:  # where it was measured
        return False
    most = MOST_QUERIES.get(query.dtype)
    if most is not None and query.shape[1] * query.shape[2] > most:
        return False
    tensors = (query, query_rope, latent, key_rope, up_key, up_value)
    # first: while a graph is traced, nothing may depend on the lengths below
    if supports(*tensors, **features) is not None:
        return False
    sizes = check_tensors(*tensors)
    return absorbs(sizes, query.shape[1], latent.shape[1], up_key is not None, up_value is not None)


def multi_latent_attention(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, up_key: Tensor | None = None,
    up_value: Tensor | None = None, *, softmax_scale: float | None = None, **features: Any,
) -> Tensor:  # fmt: skip
    """-> (B, T, H, Dv), or (B, T, H, L) without `up_value`; features: those of kernels/attention/contract.py.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    sizes = check_tensors(query, query_rope, latent, key_rope, up_key, up_value)
    tensors = (query, query_rope, latent, key_rope, up_key, up_value)
    if (reason := supports(*tensors, **features)) is not None:
        raise NotImplementedError(f"multi_latent_attention: {reason}")
    call = resolve(query, query_rope, latent, default_scale(sizes, softmax_scale), features)
    return run(*tensors, call, library.BEST)


def resolve(
    query: Tensor, query_rope: Tensor, latent: Tensor, scale: float, features: Mapping[str, Any]
) -> AttentionCall:  # fmt: skip
    """The record of a call whose tensors were checked: its features need their sizes, but for the widths."""
    rows = (query if query.shape[-1] > 0 else query_rope)[..., :1]
    keys = latent[:, :, None, :1]
    return contract.resolve(rows, keys, keys, softmax_scale=scale, **features)


def run(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, up_key: Tensor | None,
    up_value: Tensor | None, call: AttentionCall, level: int,
) -> Tensor:  # fmt: skip
    """`multi_latent_attention` for checked tensors and a resolved call; level: see library.LEVELS."""
    output: Tensor = torch.ops.easytorch_cpu.multi_latent.default(
        query,
        query_rope,
        last_dim_contiguous(latent),
        last_dim_contiguous(key_rope),
        None if up_key is None else last_dim_contiguous(up_key),
        None if up_value is None else last_dim_contiguous(up_value),
        *cpp_call.arguments(cpp_call.with_segments_as_mask(call)),
        level,
    )
    return output
