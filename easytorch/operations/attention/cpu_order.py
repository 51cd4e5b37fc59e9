"""The CPU's order of preference between ATen's fused kernel and `flash`, and the measurements behind it.

`flash` (kernels/attention/aten_flash.py) over `sdpa`, medians of calls in turn (EPYC Zen 4, AVX-512), torch 2.13,
inference and training (forward and backward); B1 H16 K16 D64 unless it says more. float32 on 2 idle cores, bfloat16 the
processor time of one thread of a busy machine:

                                        float32          bfloat16
    causal, 192 rows, B8 H12                             1.15 / 0.95
    causal, 256 rows                    1.2  / 1.2       1.14 / 0.88
    causal, 512 rows                    0.95 / 0.80      0.89 / 0.84
    causal, 1024 rows                   1.13 / 1.13      0.94 / 1.03
    causal, 2048 rows, K4 D128                           0.82 / 0.82
    all see all, 512 rows               1.3  / 1.4       1.16 / 1.02
    all see all, 1024 rows              1.3  / 1.4       1.14 / 1.13
    a dense mask, 512 rows              1.3  / 1.2       1.23 / 1.02
    a dense mask, 1024 rows             1.3  / 1.2       1.18 / 1.14
    causal as a mask, 1024 rows         0.83 / 1.0       0.76 / 0.76   its empty tiles are skipped
    window of half the rows, 1024       0.65 / 0.79      0.52 / 0.54
    129 keys around it, 512, 1024, 2048 rows: inference 0.34, 0.26, 0.34; bfloat16 0.66, 0.25, 0.15
    513 keys around it, 1024, 2048 rows: inference 0.51, 0.36; bfloat16 0.55, 0.19
    window of a quarter, 1024           0.53 / 0.58
    4 documents, 1024 rows              0.43 / 0.47
    1 document, 1024 rows               0.81 / 0.96      0.67 / 0.73
    bias, 1024 rows                     1.3  / 1.4       1.3  / 1.4

In float16, causal, 512 and 1024 rows: 0.50 and 0.77, training 0.08 and 0.09.
Models give their causal masks with padding in them, so a mask is taken for one that leaves tiles empty.
The float32 products are MKL's either way, and ATen's kernel keeps its tiles in the caches; in bfloat16 oneDNN's batched
products are three times as fast as those of ATen's kernel, which pays for scores in float32 where tiles are skipped.
Below about 2 million scores (B H T S) the dozen calls of a tile cost more than they save.

Features that ATen's kernel lacks, `flash` over the definition; 64, 256, 1024 rows:

    softcap                              0.86, 0.65, 0.17 / 0.87, 0.72, 0.14
    softcap, training                    1.3, 0.74, 0.21 / 1.35, 1.04, 0.21
    sinks                                0.98, 0.57, 0.17 / 0.93, 0.99, 0.16
    sinks, training                      1.4, 1.33, 0.25 / 1.35, 1.32, 0.22
    seeded dropout, training, 1024 rows  0.21 / 0.21

`blocksparse` (kernels/blocksparse/aten_blocks.py) over `flash`, inference, 1024 and 4096 rows:

    softcap                              0.74, 0.90 / 0.66, 0.86
    8 documents                          0.91, 0.55 / 1.21, 0.86   few documents look like no window
    window of an eighth of the rows      1.00, 0.82 / 1.23, 1.13
    window of half the rows              1.12, 1.18 / 1.67, 1.70
    sinks                                1.06, 1.15 / 1.02, 1.15
    129 keys around it, 1024, 2048 rows  0.84, 0.37   float32

Before all of them `attention` asks the operators in C++: kernels/attention/preference.py, and `decode` for one query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.contract import window_of
from easytorch.operations.attention.decode import ONE_QUERY

Preferences = tuple[tuple[str, str], ...]

HALF = (torch.bfloat16, torch.float16)

# The least query rows and scores (B H T S) that pay: in half precision, and in float32 where tiles are skipped.
ROWS, SCORES = 512, 1 << 21
FLOAT16_ROWS = 192
TRAINING_ROWS, TRAINING_SCORES = 128, 3 << 19
MOST_MASKED_TRAINING_ROWS = 512
SKIPPING_SCORES = 1 << 22
WINDOW_ROWS, DOCUMENT_ROWS = 512, 1024
# The same over the definition; at 64 rows the two are even, 0.9 to 1.1.
LACKING_ROWS, LACKING_TRAINING_SCORES = 128, 1 << 22
# The least rows at which blocksparse is ahead of flash: with softcap, and with a window of at most keys / SHARE.
BLOCK_ROWS, BLOCK_WINDOW_ROWS, WINDOW_SHARE = 1024, 4096, 8

_ATEN = ("sdpa", "ATen's fused CPU kernel, the fastest measured for this call")
ATEN_ONLY: Preferences = (_ATEN,)
SHORT: Preferences = (("sdpa", "ATen's fused CPU kernel: nothing else is ahead with so few queries"),)
DECODE_FIRST: Preferences = (ONE_QUERY, _ATEN)
DECODE_LAST: Preferences = (_ATEN, ONE_QUERY)
ATEN_FIRST: Preferences = (_ATEN, ("flash", "tiles of ATen's products carry what its kernel lacks"))
FLASH_FIRST: Preferences = (("flash", "batched half-precision products beat ATen's fused CPU kernel"), _ATEN)
BLOCKS_FIRST: Preferences = (("blocksparse", "skips blocks that nothing sees, measured ahead of flash here"), _ATEN)
SKIPPING_FIRST: Preferences = (("flash", "skips what window or documents hide, ATen's kernel does not"), _ATEN)

# All of them: `attention` makes the candidates of each when it is created.
ORDERS = (
    ATEN_ONLY, SHORT, DECODE_FIRST, DECODE_LAST, ATEN_FIRST, FLASH_FIRST, BLOCKS_FIRST,
    SKIPPING_FIRST,
)  # fmt: skip


def preferences(query: Tensor, key: Tensor, value: Tensor, features: dict[str, Any]) -> Preferences:
    """(implementation, why) in order of preference; the definition comes after them."""
    # an exported program should depend on ATen alone, and its lengths may be symbolic
    if torch.compiler.is_exporting() or query.dim() != 4 or key.dim() != 4:
        return ATEN_ONLY
    batch, rows, heads, _ = query.shape
    if rows == 1:  # without grouped heads there is nothing to fold: plain ATen
        return DECODE_FIRST if heads > key.shape[2] else DECODE_LAST
    if rows < LACKING_ROWS:
        return SHORT
    keys = key.shape[1]
    scores = batch * heads * rows * keys
    training = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    get = features.get
    if not training and _by_blocks(query, keys, get):
        return BLOCKS_FIRST
    if get("softcap") is not None or get("sinks") is not None or get("dropout_prob"):
        # dropout without a seed is left to ATen
        return ATEN_ONLY if training and scores < LACKING_TRAINING_SCORES else ATEN_FIRST
    if get("bias") is not None or scores < TRAINING_SCORES:
        return ATEN_ONLY
    if query.dtype in HALF:
        bfloat16 = query.dtype == torch.bfloat16
        if bfloat16 and not _may_skip(get):
            return ATEN_ONLY
        if training:
            dense = get("mask") is not None and rows > MOST_MASKED_TRAINING_ROWS
            return ATEN_ONLY if rows < TRAINING_ROWS or dense else FLASH_FIRST
        return FLASH_FIRST if rows >= (ROWS if bfloat16 else FLOAT16_ROWS) and scores >= SCORES else ATEN_ONLY
    if query.dtype == torch.float32 and get("mask") is None and scores >= SKIPPING_SCORES:
        if get("query_segment_ids") is not None:
            return SKIPPING_FIRST if rows >= DOCUMENT_ROWS else ATEN_ONLY
        window = get("sliding_window")
        if window is not None and rows >= WINDOW_ROWS:
            left, right = window_of(window)
            seen = left if get("causal") else None if left is None or right is None else left + right
            return SKIPPING_FIRST if seen is not None and 0 <= seen <= keys // 2 else ATEN_ONLY
    return ATEN_ONLY


def _may_skip(get: Callable[[str], Any]) -> bool:
    """Whether the call may have fully masked tiles."""
    return bool(get("causal")) or not (get("mask") is get("sliding_window") is get("query_segment_ids") is None)


def _by_blocks(query: Tensor, keys: int, get: Callable[[str], Any]) -> bool:
    """Whether blocksparse was measured fastest for this call; inference only."""
    rows = query.shape[1]
    if rows < BLOCK_ROWS or get("mask") is not None or get("bias") is not None or get("dropout_prob"):
        return False
    if get("softcap") is not None:
        return query.dtype in (torch.float32, torch.bfloat16)
    if get("sinks") is not None or query.dtype != torch.float32:
        return False
    window = get("sliding_window")
    if window is None:
        return False
    left, right = window_of(window)
    if not get("causal"):  # both sides of a query
        return left is not None and right is not None and 0 <= left + right <= keys // WINDOW_SHARE
    return rows >= BLOCK_WINDOW_ROWS and left is not None and 0 <= left <= keys // WINDOW_SHARE
