"""Decoding attention by ATen's fused CPU kernel on blocks of keys, joined by their log-sum-exps; without a gradient.

Between two keys of a head in a (B, S, K, D) cache lie the other heads. With the blocks as a dimension of the batch the
kernel goes through all heads of one block before the next, over addresses that stay in the TLB, and one sequence with
few heads has more parts to share among the cores (FlashDecoding, https://pytorch.org/blog/flash-decoding).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.attention.logsumexp import fits_one_number

_BLOCK = 1024


def attend_split(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float) -> Tensor:
    """query (B, K, G, D), key and value (B, S, K, D), attn_mask (1 | B, 1 | K, 1 | G, S) -> (B, K, G, D).

    attn_mask is boolean or added to the scores. A row that sees nothing gives zeros. Where one number does not hold the
    logsumexp of a block (attention/logsumexp.py) the kernel takes all keys at once.
    """
    batch, kv_heads, group, dim = query.shape
    keys = key.shape[1]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = query.new_zeros(attn_mask.shape).masked_fill_(~attn_mask, float("-inf"))
    whole = keys // _BLOCK * _BLOCK
    outputs, sums = [], []
    for start, end, size in ((0, whole, _BLOCK), (whole, keys, keys - whole)):
        if start == end:
            continue
        blocks = (end - start) // size
        part = None
        if attn_mask is not None:
            part = attn_mask[..., start:end].unflatten(-1, (blocks, size)).movedim(-2, 1)
            part = part.expand(batch, *part.shape[1:]).flatten(0, 1)
        output, sum_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, None].expand(batch, blocks, kv_heads, group, dim).flatten(0, 1),
            key[:, start:end].unflatten(1, (blocks, size)).flatten(0, 1).transpose(1, 2),
            value[:, start:end].unflatten(1, (blocks, size)).flatten(0, 1).transpose(1, 2),
            attn_mask=part,
            scale=scale,
        )
        if part is not None:  # where a row sees nothing of a block the kernel gives 0 for the log of an empty sum
            sum_ = sum_.masked_fill((part == float("-inf")).all(-1), float("-inf"))
        outputs.append(output.unflatten(0, (batch, blocks)))
        sums.append(sum_.unflatten(0, (batch, blocks)))
    log_sums = torch.cat(sums, dim=1).unsqueeze(-1)  # (B, blocks, K, G, 1), float32
    if not fits_one_number(log_sums):
        return F.scaled_dot_product_attention(
            query, key.transpose(1, 2), value.transpose(1, 2), attn_mask=attn_mask, scale=scale
        )
    shares = torch._safe_softmax(log_sums, 1)
    return (torch.cat(outputs, dim=1) * shares).sum(1).to(query.dtype)
