"""Attention with QK-norm per head (arXiv:2302.05442)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.norm import RMSNorm


class HeadNormAttention(GroupedAttention):
    """`GroupedAttention` with norms of queries and keys over head_dim, before the rotation."""

    norm_class: ClassVar[type[nn.Module]] = RMSNorm

    def __init__(self, config: Any, layer_idx: int, **options: Any) -> None:
        super().__init__(config, layer_idx, **options)
        self.q_norm = self.norm_class(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = self.norm_class(self.head_dim, eps=config.rms_norm_eps)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, *positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().rotate(self.q_norm(query), self.k_norm(key), *positions)
