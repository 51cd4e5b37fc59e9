"""CLIP's text tower (arXiv:2103.00020): causal layers, and the output of the token that ends the text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CLIPTextConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.cache_names import cache_keyword
from easytorch.layers.linear import linear
from easytorch.layers.norm import LayerNorm
from easytorch.layers.tower import TowerEncoder
from easytorch.layers.two_towers import token_rows
from easytorch.models._clip_layers import CLIPEncoderLayer, CLIPPreTrainedModel, CLIPTextEmbeddings, init_weight

# That of configs before transformers 4.31; the text ends at its largest token id there.
_OLD_EOS = 2


class CLIPTextPreTrainedModel(CLIPPreTrainedModel):
    config: CLIPTextConfig
    config_class = CLIPTextConfig
    input_modalities = ("text",)
    # the other tower of a checkpoint with both, and what compares them
    head_weights = (*CLIPPreTrainedModel.head_weights, r"^vision_model\.", r"^logit_scale$")


class CLIPTextModel(CLIPTextPreTrainedModel):
    _input_embed_layer = "token_embedding"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not isinstance(config.eos_token_id, int):
            raise ValueError(
                f"{config.model_type}: config.eos_token_id={config.eos_token_id!r} must be one token: a text is "
                f"the output of the first of them"
            )
        self.embeddings = CLIPTextEmbeddings(config)
        self.encoder = TowerEncoder(config, CLIPEncoderLayer)
        self.final_layer_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.eos_token_id = config.eos_token_id
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
        """input_ids (B, T) -> last_hidden_state (B, T, D), pooler_output (B, D). attention_mask (B, T): 0 for padding.

        T is at most config.max_position_embeddings. position_ids: (B or 1, T).
        """
        input_ids = token_rows(input_ids)
        hidden_states = self.embeddings(input_ids, position_ids)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask, **cache_keyword(None)
        )
        kwargs["is_causal"] = True
        tokens = self.final_layer_norm(self.encoder(hidden_states, mask, **kwargs))
        ends = input_ids if self.eos_token_id == _OLD_EOS else input_ids == self.eos_token_id
        ends = ends.to(tokens.device, torch.int).argmax(dim=-1)
        pooled = tokens[torch.arange(tokens.shape[0], device=tokens.device), ends]
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=pooled)


class CLIPTextModelWithProjection(CLIPTextPreTrainedModel):
    """The text in the space that it has in common with images."""

    base_model_prefix = "text_model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.text_model = CLIPTextModel._from_config(config)
        self.text_projection = nn.Linear(config.hidden_size, config.projection_dim, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            init_weight(self.text_projection, self.config.hidden_size**-0.5 * self.config.initializer_factor)

    def get_input_embeddings(self) -> nn.Module:
        return self.text_model.embeddings.token_embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.text_model.embeddings.token_embedding = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CLIPTextModelOutput:
        """As `CLIPTextModel.forward` -> text_embeds (B, E), last_hidden_state (B, T, D)."""
        outputs = self.text_model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **kwargs
        )
        return CLIPTextModelOutput(
            text_embeds=linear(self.text_projection, outputs.pooler_output),
            last_hidden_state=outputs.last_hidden_state,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
