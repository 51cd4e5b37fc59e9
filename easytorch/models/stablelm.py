"""StableLM (arXiv:2402.17834): partial rotary positions, layer norms, if set also of each head, and parallel parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, StableLmConfig

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.norm import LayerNorm
from easytorch.layers.rotary import PartialRotaryEmbedding
from easytorch.models.mistral import MistralMLP
from easytorch.protocol.native import NativeDecoder


class StableLmLayerNormPerHead(nn.Module):
    """(B, T, H, head_dim) -> the same, each head by a norm of its own."""

    def __init__(self, head_dim: int, heads: int, eps: float) -> None:
        super().__init__()
        self.dim, self.num_heads = head_dim, heads
        self.norms = nn.ModuleList(LayerNorm(head_dim, eps=eps, bias=False) for _ in range(heads))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return torch.stack([norm(head) for norm, head in zip(self.norms, heads.unbind(2), strict=True)], 2)


class StableLmAttention(GroupedAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=config.use_qkv_bias, out_bias=False)
        self.qk_layernorm = config.qk_layernorm
        if self.qk_layernorm:
            eps = config.layer_norm_eps
            self.q_layernorm = StableLmLayerNormPerHead(self.head_dim, self.num_heads, eps)
            self.k_layernorm = StableLmLayerNormPerHead(self.head_dim, self.num_key_value_heads, eps)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, *positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return super().rotate(query, key, *positions)


class StableLmDecoderLayer(DecoderLayer):
    attention_class = StableLmAttention
    mlp_class = MistralMLP
    norm_class = LayerNorm
    norm_eps = "layer_norm_eps"

    def add_modules(self, config: Any, layer_idx: int) -> None:
        super().add_modules(config, layer_idx)
        self.use_parallel_residual = config.use_parallel_residual
        if self.use_parallel_residual:
            self.register_module("post_attention_layernorm", None)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normalized = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normalized, **kwargs)
        hidden_states = hidden_states + attended
        if not self.use_parallel_residual:
            normalized = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.dropout(self.mlp(normalized))


class StableLmPreTrainedModel(NativeDecoder):
    config: StableLmConfig
    config_class = StableLmConfig
    _no_split_modules = ["StableLmDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": StableLmDecoderLayer, "attentions": StableLmAttention}  # noqa: RUF012


class StableLmModel(DecoderBackbone, StableLmPreTrainedModel):
    layer_class = StableLmDecoderLayer
    rotary_class = PartialRotaryEmbedding


class StableLmForCausalLM(CausalLMHead, StableLmPreTrainedModel, GenerationMixin):
    backbone_class = StableLmModel
    _tp_plan = _pp_plan = _fsdp_plan = None  # transformers has none


class StableLmForSequenceClassification(SequenceClassificationHead, StableLmPreTrainedModel):
    backbone_class = StableLmModel


class StableLmForTokenClassification(TokenClassificationHead, StableLmPreTrainedModel):
    backbone_class = StableLmModel
