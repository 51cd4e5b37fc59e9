"""Building blocks of SigLIP's towers, and the initialization of their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import SiglipConfig
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.linear import linear
from easytorch.layers.norm import LayerNorm
from easytorch.layers.stock_names import given_by
from easytorch.layers.tower import PooledAttention, TowerEncoder, TowerLayer, TowerMLP
from easytorch.layers.two_towers import TextEmbeddings, token_rows
from easytorch.models._clip_layers import CLIPAttention
from easytorch.protocol.native import NativeModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # the family's `PreTrainedModel` stands behind the tower in the bases


class SiglipAttention(CLIPAttention):
    pass


class SiglipMLP(TowerMLP):
    pass


class SiglipEncoderLayer(TowerLayer):
    embed_dim = given_by("config.hidden_size")
    attention_name = "self_attn"
    norms = ("layer_norm1", "layer_norm2")
    attention_class: type[SiglipAttention] = SiglipAttention

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.layer_norm1 = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = self.attention_class(config, layer_idx)
        self.layer_norm2 = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = SiglipMLP(config)


class SiglipMultiheadAttentionPoolingHead(nn.Module):
    """Attention pooling: a learned query attends to the tokens, then an MLP: (B, T, D) -> (B, D)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.probe = nn.Parameter(torch.randn(1, 1, config.hidden_size))
        self.attention = PooledAttention(config.hidden_size, config.num_attention_heads)
        self.layernorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = SiglipMLP(config)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """attention_mask (B, T): 0 for padding."""
        probe = self.probe.expand(hidden_states.shape[0], -1, -1)
        mask = None
        if attention_mask is not None:
            mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=probe,
                attention_mask=attention_mask,
                encoder_hidden_states=hidden_states,
            )
        attended = self.attention(probe, hidden_states, mask)
        return (attended + self.mlp(self.layernorm(attended)))[:, 0]


class SiglipTextEmbeddings(TextEmbeddings):
    pass


class SiglipPreTrainedModel(NativeModel):
    least_counts: ClassVar = {"intermediate_size": 1}  # its first weights are drawn by their widths
    config: SiglipConfig
    config_class = SiglipConfig
    base_model_prefix = "siglip"
    input_modalities = ("image", "text")
    head_weights: ClassVar[tuple[str, ...]] = (r"^classifier\.",)
    _no_split_modules = [  # noqa: RUF012
        "SiglipTextEmbeddings",
        "SiglipVisionEmbeddings",
        "SiglipEncoderLayer",
        "SiglipMultiheadAttentionPoolingHead",
    ]
    _can_record_outputs = {"hidden_states": SiglipEncoderLayer, "attentions": SiglipAttention}  # noqa: RUF012
    # buffers of old checkpoints
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids$"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Embedding):
            init.default_flax_embed_init_(module.weight)
        elif isinstance(module, SiglipAttention):
            for name in (*module.order, module.output_name):
                layer = getattr(module, name)
                init.xavier_uniform_(layer.weight)
                init.zeros_(layer.bias)
        elif isinstance(module, SiglipMLP):
            for name in (module.up_name, module.down_name):
                layer = getattr(module, name)
                init.xavier_uniform_(layer.weight)
                init.normal_(layer.bias, std=1e-6)
        elif isinstance(module, SiglipMultiheadAttentionPoolingHead):
            init.xavier_uniform_(module.probe)
            init.xavier_uniform_(module.attention.in_proj_weight)
            init.zeros_(module.attention.in_proj_bias)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            init.lecun_normal_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, SiglipTextEmbeddings):
            module.init_buffers()


class SiglipTextTower(_Base):
    """Layers that see the whole text, and a projection of the last token, padding or not."""

    input_modalities: Any = ("text",)
    base_model_prefix = "text_model"
    # the other tower of a checkpoint with both, and what compares them
    head_weights: ClassVar[tuple[str, ...]] = (r"^classifier\.", r"^vision_model\.", r"^logit_(scale|bias)$")
    _input_embed_layer = "token_embedding"
    embeddings_class: type[TextEmbeddings] = SiglipTextEmbeddings
    layer_class: type[SiglipEncoderLayer] = SiglipEncoderLayer

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embeddings = self.embeddings_class(config)
        self.encoder = TowerEncoder(config, self.layer_class)
        self.final_layer_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.projection_size)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """input_ids (B, T) -> last_hidden_state (B, T, D), pooler_output (B, E). attention_mask (B, T): 0 for padding.

        T is at most config.max_position_embeddings; SigLIP was trained on texts padded to it, without a mask.
        """
        hidden_states = self.embeddings(token_rows(input_ids), position_ids)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask)
        tokens = self.final_layer_norm(self.encoder(hidden_states, mask, **kwargs))
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=linear(self.head, tokens[:, -1]))
