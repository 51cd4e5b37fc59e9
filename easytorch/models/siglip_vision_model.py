"""SigLIP's vision tower (arXiv:2303.15343): ViT without a class token, and a head that pools by attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import SiglipVisionConfig
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.norm import LayerNorm
from easytorch.layers.tower import TowerEncoder
from easytorch.models._siglip_layers import (
    SiglipEncoderLayer,
    SiglipMultiheadAttentionPoolingHead,
    SiglipPreTrainedModel,
)
from easytorch.models.clip_vision_model import CLIPVisionEmbeddings


class SiglipVisionEmbeddings(CLIPVisionEmbeddings):
    has_class_token = False
    patch_bias = True


class SiglipVisionModel(SiglipPreTrainedModel):
    config: SiglipVisionConfig
    config_class = SiglipVisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    base_model_prefix = "vision_model"
    # the other tower of a checkpoint with both, and what compares them
    head_weights = (r"^classifier\.", r"^text_model\.", r"^logit_(scale|bias)$")
    _input_embed_layer = "patch_embedding"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embeddings = SiglipVisionEmbeddings(config)
        self.encoder = TowerEncoder(config, SiglipEncoderLayer)
        self.post_layernorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.use_head = config.vision_use_head
        if self.use_head:
            self.head = SiglipMultiheadAttentionPoolingHead(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SiglipVisionEmbeddings):
            init.normal_(module.position_embedding.weight, std=self.config.hidden_size**-0.5)
            module.init_buffers()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool | None = False, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """pixel_values (B, C, height, width) -> last_hidden_state (B, N, D), and pooler_output (B, D) by the head."""
        tokens = self.encoder(self.embeddings(pixel_values, interpolate_pos_encoding), **kwargs)
        tokens = self.post_layernorm(tokens)
        return BaseModelOutputWithPooling(
            last_hidden_state=tokens, pooler_output=self.head(tokens) if self.use_head else None
        )
