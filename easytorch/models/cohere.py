"""Command R: attention and MLP in parallel after one norm, interleaved rotary pairs, and scaled logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CohereConfig, GenerationMixin

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead
from easytorch.layers.norm import LayerNorm
from easytorch.layers.rotary import RotaryEmbedding
from easytorch.layers.stock_names import given_by, same_as
from easytorch.models.mistral import MistralMLP
from easytorch.protocol.native import NativeDecoder


class CohereLayerNorm(LayerNorm):
    variance_epsilon = same_as("eps")

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, bias=False)


class HeadLayerNorm(nn.Module):
    """LayerNorm of each head with weights of its own, in float32: (B, T, H, head_dim) -> the same."""

    variance_epsilon = same_as("norm.eps")

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.norm = LayerNorm(head_dim, eps=eps, elementwise_affine=False)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * self.norm(heads.float())).type_as(heads)


class CohereRotaryEmbedding(RotaryEmbedding):
    """cos and sin rounded to the dtype of `x`, then in float32, in which the heads are rotated."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super().forward(x, position_ids)
        return cos.float(), sin.float()


class CohereAttention(GroupedAttention):
    use_qk_norm = given_by("config.use_qk_norm")
    interleaved = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if getattr(config, "use_qk_norm", False):
            self.q_norm = HeadLayerNorm(self.num_heads, self.head_dim, config.layer_norm_eps)
            self.k_norm = HeadLayerNorm(self.num_key_value_heads, self.head_dim, config.layer_norm_eps)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, *positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if getattr(self.config, "use_qk_norm", False):
            query, key = self.q_norm(query), self.k_norm(key)
        return super().rotate(query, key, *positions)


class CohereDecoderLayer(DecoderLayer):
    """x + attention(norm(x)) + mlp(norm(x))."""

    attention_class = CohereAttention
    mlp_class = MistralMLP
    norm_class = CohereLayerNorm
    norm_eps = "layer_norm_eps"
    norms = ("input_layernorm",)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normalized = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normalized, **kwargs)
        return hidden_states + attended + self.mlp(normalized)


class CoherePreTrainedModel(NativeDecoder):
    config: CohereConfig
    config_class = CohereConfig
    _no_split_modules = ["CohereDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": CohereDecoderLayer, "attentions": CohereAttention}  # noqa: RUF012


class CohereModel(DecoderBackbone, CoherePreTrainedModel):
    layer_class = CohereDecoderLayer
    rotary_class = CohereRotaryEmbedding


class CohereForCausalLM(CausalLMHead, CoherePreTrainedModel, GenerationMixin):
    tie_word_embeddings = given_by("config.tie_word_embeddings")
    backbone_class = CohereModel

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.logit_scale = config.logit_scale

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        scale = self.logit_scale
        return logits if scale is None else logits * scale

    def logits_finish(self) -> tuple[float, float | None]:
        scale = self.logit_scale
        return 1.0 if scale is None else scale, None
