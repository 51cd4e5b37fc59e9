"""Token embeddings with a scale, and the decoder that starts from them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from easytorch.layers.config_checks import padding_of
from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.stock_names import same_as


class ScaledEmbedding(nn.Embedding):
    """weight[ids] * scale: (B, T) -> (B, T, D). The scale is rounded to the weight's dtype, as in Gemma's training."""

    scalar_embed_scale = same_as("scale")

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, scale: float) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.scale = scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # a number, not a buffer, so that nothing has to be filled after loading on the meta device
        return super().forward(input) * _rounded(self.scale, self.weight.dtype)

    @property
    def embed_scale(self) -> torch.Tensor:
        """The scale as transformers has it, which PEFT multiplies the output of an adapter of the embedding by."""
        return torch.tensor(self.scale, device=self.weight.device)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale}"


class ScaledBackbone(DecoderBackbone):
    """`DecoderBackbone` whose embeddings are multiplied by sqrt(hidden_size)."""

    @staticmethod
    def embedding(config: Any) -> nn.Embedding:
        return ScaledEmbedding(config.vocab_size, config.hidden_size, padding_of(config), config.hidden_size**0.5)


@functools.cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()
