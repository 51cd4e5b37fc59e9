"""The absorbed plan in plain torch, on any device: memory linear in T, forward and backward. See contract.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from easytorch.kernels.attention import aten_op, blocked
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.attention.native import working_dtype
from easytorch.kernels.multi_latent.contract import check_tensors, default_scale
from easytorch.kernels.multi_latent.plans import absorb, project

# From this cache size (in elements) on, bfloat16 is multiplied without widening (`_exact`); smaller caches are as fast
# in float32.
NARROW_PRODUCTS = 1 << 17
WIDENED_AT_ONCE = 1 << 19
# Time of the tiles divided by blocks of the absorbed definition, float32 and bfloat16: B1 H16 T16 S512 0.98, 0.44; B1
# H16 T128 S1024 0.88, 0.46; B4 H16 T2 S4096 1.9, 0.20; B1 H4 T2 S64 1.5, 1.1.
FLASH_SCORES = 1 << 14  # B T H S in bfloat16
FLASH_ROWS = 64

# without dropout these change nothing for one token
_OF_ANY_CALL = frozenset({"causal", "dropout_prob", "seed"})


def multi_latent_attention(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    up_key: torch.Tensor | None = None,
    up_value: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    **features: Any,
) -> torch.Tensor:
    """-> (B, T, H, Dv), or (B, T, H, L) without `up_value`; features: those of kernels/attention/contract.py."""
    sizes = check_tensors(query, query_rope, latent, key_rope, up_key, up_value)
    scale = default_scale(sizes, softmax_scale)
    query = absorb(query, up_key)
    plain = not features.get("dropout_prob") and all(
        value is None for name, value in features.items() if name not in _OF_ANY_CALL
    )
    # an exported program should not depend on the lengths it was traced with
    if plain and query.shape[1] == 1 and not torch.compiler.is_exporting():
        return project(_one_token(query, query_rope, latent, key_rope, scale), up_value)
    tensors = _as_one_head(query, query_rope, latent, key_rope)
    call = resolve(*tensors, softmax_scale=scale, **features)
    return project(attention_of(tensors[0], latent.shape[1])(*tensors, call), up_value)


def attend(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    up_key: torch.Tensor | None,
    up_value: torch.Tensor | None,
    call: AttentionCall,
) -> torch.Tensor:
    """`multi_latent_attention` for checked tensors and a resolved call."""
    query = absorb(query, up_key)
    sees_all = call.plain and call.left is None and call.right in (None, 0)  # the one token is the last
    if sees_all and query.shape[1] == 1 and not torch.compiler.is_exporting():
        return project(_one_token(query, query_rope, latent, key_rope, call.scale), up_value)
    tensors = _as_one_head(query, query_rope, latent, key_rope)
    return project(attention_of(tensors[0], latent.shape[1])(*tensors, call), up_value)


def _as_one_head(
    query: torch.Tensor, query_rope: torch.Tensor, latent: torch.Tensor, key_rope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query (B, T, H, L + R), key (B, S, 1, L + R), value (B, S, 1, L) of ordinary attention."""
    keys = torch.cat([latent, key_rope], dim=-1)[:, :, None]
    return torch.cat([query, query_rope], dim=-1), keys, latent[:, :, None]


def attention_of(query: torch.Tensor, keys: int) -> Callable[..., torch.Tensor]:
    """The attention of a resolved call, for a query (B, T, H, D) over `keys` keys: tiled products on the CPU where they
    are faster."""
    if query.device.type != "cpu" or torch.compiler.is_exporting():
        return blocked.blockwise
    narrow = query.dtype == torch.bfloat16 and query.shape[:3].numel() * keys >= FLASH_SCORES
    return aten_op.by_operator if narrow or query.shape[1] >= FLASH_ROWS else blocked.blockwise


def _one_token(
    query: torch.Tensor, query_rope: torch.Tensor, latent: torch.Tensor, key_rope: torch.Tensor, scale: float
) -> torch.Tensor:
    """query (B, 1, H, L) over the cache, which is not copied, nor widened at once where it is large."""
    dtype, rows, rotated = query.dtype, query.squeeze(1), query_rope.squeeze(1)
    wide = working_dtype(query)
    if dtype == torch.bfloat16 and latent.numel() >= NARROW_PRODUCTS:
        scores = _exact(rows, latent) + _exact(rotated, key_rope)
        shares = torch.softmax(scores * scale, dim=-1)
        return torch.bmm(shares.to(dtype), latent)[:, None]
    if dtype == wide:
        return _products(rows, rotated, latent, key_rope, scale)[:, None]
    rows, rotated = rows.to(wide), rotated.to(wide)
    # torch.compile would unroll a loop over the batch
    if latent.numel() < WIDENED_AT_ONCE or torch.compiler.is_compiling():
        return _products(rows, rotated, latent.to(wide), key_rope.to(wide), scale).to(dtype)[:, None]
    outputs = [  # one sequence at a time, so that its widened part stays in the cache
        _products(rows[b : b + 1], rotated[b : b + 1], latent[b : b + 1].to(wide), key_rope[b : b + 1].to(wide), scale)
        for b in range(len(rows))
    ]
    return torch.cat(outputs).to(dtype)[:, None]


def _exact(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """query (B, H, N) @ key (B, S, N) of bfloat16 as float32 (B, H, S), without a copy of the keys in float32.

    ATen rounds such a product to bfloat16; a second product, less the first, adds what that lost: an error of 2**-18.
    """
    rounded = torch.bmm(query, key.mT)
    lost = torch.baddbmm(rounded, query, key.mT, beta=-1.0)
    return rounded.float() + lost


def _products(
    query: torch.Tensor, query_rope: torch.Tensor, latent: torch.Tensor, key_rope: torch.Tensor, scale: float
) -> torch.Tensor:
    """(B, H, L), (B, H, R), (B, S, L), (B, S, R) -> (B, H, L), each product in their dtype."""
    scores = torch.bmm(query_rope, key_rope.mT)
    scores = torch.baddbmm(scores, query, latent.mT, beta=scale, alpha=scale)
    return torch.bmm(torch.softmax(scores, dim=-1), latent)
