"""Building blocks of SigLIP 2's towers: SigLIP's layers under transformers' names for SigLIP 2."""

from __future__ import annotations

from transformers import Siglip2Config

from easytorch.layers.stock_names import given_by
from easytorch.models._siglip_layers import (
    SiglipAttention,
    SiglipEncoderLayer,
    SiglipMultiheadAttentionPoolingHead,
    SiglipPreTrainedModel,
    SiglipTextEmbeddings,
)


class Siglip2Attention(SiglipAttention):
    pass


class Siglip2EncoderLayer(SiglipEncoderLayer):
    attention_class = Siglip2Attention


class Siglip2TextEmbeddings(SiglipTextEmbeddings):
    pass


class Siglip2MultiheadAttentionPoolingHead(SiglipMultiheadAttentionPoolingHead):
    num_heads = given_by("config.num_attention_heads")


class Siglip2PreTrainedModel(SiglipPreTrainedModel):
    config: Siglip2Config
    config_class = Siglip2Config
    base_model_prefix = "siglip2"
    _no_split_modules = [  # noqa: RUF012
        "Siglip2TextEmbeddings",
        "Siglip2VisionEmbeddings",
        "Siglip2EncoderLayer",
        "Siglip2MultiheadAttentionPoolingHead",
    ]
    _can_record_outputs = {"hidden_states": Siglip2EncoderLayer, "attentions": Siglip2Attention}  # noqa: RUF012
