"""Building blocks of CLIP's towers, and the initialization of their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CLIPConfig
from transformers import initialization as init

from easytorch.layers.encoder import check_heads
from easytorch.layers.norm import LayerNorm
from easytorch.layers.stock_names import given_by
from easytorch.layers.tower import TowerAttention, TowerLayer, TowerMLP
from easytorch.layers.two_towers import TextEmbeddings
from easytorch.protocol.native import NativeModel


class CLIPAttention(TowerAttention):
    order = ("k_proj", "v_proj", "q_proj")

    def __init__(self, config: Any, layer_idx: int) -> None:
        check_heads(config.hidden_size, config.num_attention_heads)
        super().__init__(config, layer_idx)


class CLIPMLP(TowerMLP):
    pass


class CLIPEncoderLayer(TowerLayer):
    embed_dim = given_by("config.hidden_size")
    attention_name = "self_attn"
    norms = ("layer_norm1", "layer_norm2")

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.self_attn = CLIPAttention(config, layer_idx)
        self.layer_norm1 = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = CLIPMLP(config)
        self.layer_norm2 = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class CLIPTextEmbeddings(TextEmbeddings):
    pass


class CLIPPreTrainedModel(NativeModel):
    config: CLIPConfig
    config_class = CLIPConfig
    base_model_prefix = "clip"
    input_modalities = ("image", "text")
    head_weights = (r"^(classifier|text_projection|visual_projection)\.",)
    _no_split_modules = ["CLIPTextEmbeddings", "CLIPEncoderLayer", "CLIPVisionEmbeddings"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": CLIPEncoderLayer, "attentions": CLIPAttention}  # noqa: RUF012
    # buffers of old checkpoints
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids$"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        config: Any = self.config
        factor = config.initializer_factor
        if isinstance(module, CLIPTextEmbeddings):
            init_weight(module.token_embedding, factor * 0.02)
            init_weight(module.position_embedding, factor * 0.02)
            module.init_buffers()
        elif isinstance(module, CLIPAttention | CLIPMLP):
            width = config.hidden_size
            inner = width**-0.5 * (2 * config.num_hidden_layers) ** -0.5 * factor
            if isinstance(module, CLIPAttention):
                stds = dict.fromkeys(module.order, inner) | {"out_proj": width**-0.5 * factor}
            else:
                stds = {"fc1": (2 * width) ** -0.5 * factor, "fc2": inner}
            for name, std in stds.items():
                init_weight(getattr(module, name), std)


def init_weight(layer: Any, std: float) -> None:
    """Normal of this deviation; nothing for a layer that quantization left without a weight."""
    if getattr(layer, "weight", None) is not None:
        init.normal_(layer.weight, std=std)
