"""GPT-2: learned positions, layer norms, one matrix for q, k and v, weights that are stored transposed (`Conv1D`)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin, GPT2Config, initialization
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, CausalLMOutputWithCrossAttentions
from transformers.models.gpt2.modeling_gpt2 import GPT2DoubleHeadsModelOutput, GPT2SequenceSummary
from transformers.pytorch_utils import Conv1D
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from easytorch.cache_names import CACHE, cache_keyword, cache_of, takes_cache
from easytorch.layers.arguments import ArgumentsInOrder
from easytorch.layers.attention import interface_of
from easytorch.layers.basics import activation, check_one_input
from easytorch.layers.causal_loss import shifted_by_one
from easytorch.layers.config import attn_implementation
from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.deferred_logits import DeferredLogits, deferring
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.layers.linear import linear
from easytorch.layers.norm import LayerNorm
from easytorch.layers.stock_names import given_by
from easytorch.layers.word_loss import fused_loss_of
from easytorch.protocol.native import NativeDecoder


class GPT2MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        inner = config.n_inner if config.n_inner is not None else 4 * config.hidden_size
        self.c_fc = Conv1D(inner, config.hidden_size)
        self.c_proj = Conv1D(config.hidden_size, inner)
        self.act = activation(config.activation_function)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(hidden_states))))


class GPT2Attention(GroupedAttention):
    embed_dim = given_by("config.hidden_size")
    split_size = given_by("config.hidden_size")
    scale_attn_weights = given_by("config.scale_attn_weights")
    scale_attn_by_inverse_layer_idx = given_by("config.scale_attn_by_inverse_layer_idx")
    reorder_and_upcast_attn = given_by("config.reorder_and_upcast_attn")
    is_cross_attention = False

    def __init__(self, config: Any, layer_idx: int) -> None:
        if config.hidden_size % config.num_attention_heads:
            heads, width = config.num_attention_heads, config.hidden_size
            raise ValueError(f"gpt2: n_embd={width} is not a multiple of n_head={heads}")
        scaling = (config.hidden_size // config.num_attention_heads) ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scaling /= layer_idx + 1
        super().__init__(config, layer_idx, scaling=scaling, bias=True)
        self.attention_dropout = config.attn_pdrop
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def make_projections(self, bias: bool, out_bias: bool) -> None:
        self.c_attn = Conv1D(3 * self.config.hidden_size, self.config.hidden_size)
        self.c_proj = Conv1D(self.config.hidden_size, self.config.hidden_size)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.c_attn(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)

    def project_output(self, attended: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return self.resid_dropout(self.c_proj(attended))


class GPT2CrossAttention(GPT2Attention):
    """Keys and values come from the encoder, once: later tokens read them from the cache."""

    is_cross_attention = True
    is_causal = False

    def make_projections(self, bias: bool, out_bias: bool) -> None:
        hidden = self.config.hidden_size
        self.c_attn, self.q_attn = Conv1D(2 * hidden, hidden), Conv1D(hidden, hidden)
        self.c_proj = Conv1D(hidden, hidden)

    @takes_cache
    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        output_attentions: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, T, D), encoder_hidden_states (B, S, D) -> (B, T, D) and weights or None."""
        query = self.q_attn(hidden_states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        key, value = self._key_value(encoder_hidden_states, cache)
        attend = interface_of(attn_implementation(self.config))
        given = {"scaling": self.scaling, "output_attentions": output_attentions}
        given["dropout"] = self.attention_dropout if self.training else 0.0
        output, weights = attend(self, query, key, value, encoder_attention_mask, **given)
        return self.project_output(output.flatten(2)), weights

    def _key_value(self, encoder_hidden_states: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if cache is not None and cache.is_updated.get(self.layer_idx):
            stored = cache.cross_attention_cache.layers[self.layer_idx]
            return stored.keys, stored.values
        heads = self.c_attn(encoder_hidden_states).unflatten(-1, (2, self.num_heads, self.head_dim))
        key, value = (one.transpose(1, 2) for one in heads.unbind(2))
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return key, value


class GPT2Block(DecoderLayer):
    """x + attention(norm(x)), then x + cross attention if there is an encoder, then x + mlp(norm(x))."""

    attention_class = GPT2Attention
    mlp_class = GPT2MLP
    norm_class = LayerNorm
    norm_eps = "layer_norm_epsilon"

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.ln_1 = self.new_norm(config)
        self.attn = self.attention_class(config, layer_idx)
        self.ln_2 = self.new_norm(config)
        if config.add_cross_attention:
            self.crossattention = GPT2CrossAttention(config, layer_idx)
            self.ln_cross_attn = self.new_norm(config)
        self.mlp = self.mlp_class(config)

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        both = cache if isinstance(cache, EncoderDecoderCache) else None
        own = cache if both is None else both.self_attention_cache
        attended, _ = self.attn(hidden_states=self.ln_1(hidden_states), **cache_keyword(own), **kwargs)
        hidden_states = hidden_states + attended
        if encoder_hidden_states is not None:
            attended, _ = self.crossattention(
                self.ln_cross_attn(hidden_states),
                encoder_hidden_states,
                encoder_attention_mask,
                both,
                kwargs.get("output_attentions"),
            )
            hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class GPT2PreTrainedModel(NativeDecoder):
    config: GPT2Config
    config_class = GPT2Config
    base_model_prefix = "transformer"
    head_weights = (r"^(lm_head|multiple_choice_head|score|classifier|qa_outputs)\.",)
    _input_embed_layer = "wte"
    _no_split_modules = ["GPT2Block"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": GPT2Block,
        "attentions": OutputRecorder(GPT2Attention, layer_name=".attn", index=1),
        "cross_attentions": OutputRecorder(GPT2CrossAttention, layer_name=".crossattention", index=1),
    }
    _keys_to_ignore_on_load_unexpected = ["attn.bias", "attn.masked_bias", "crossattention.bias"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, Conv1D):
            initialization.normal_(module.weight, mean=0.0, std=std)
            initialization.zeros_(module.bias)
        if isinstance(module, GPT2Attention | GPT2MLP):  # projections into the residual, scaled by their number
            initialization.normal_(module.c_proj.weight, mean=0.0, std=std / math.sqrt(2 * self.config.n_layer))


class GPT2Model(DecoderBackbone, GPT2PreTrainedModel):
    embed_dim = given_by("config.hidden_size")
    layer_class = GPT2Block
    output_class = BaseModelOutputWithPastAndCrossAttentions
    rotary_class = None
    layers_name, norm_name = "h", "ln_f"

    def add_modules(self, config: Any) -> None:
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(self.layer_class(config, index) for index in range(config.num_hidden_layers))
        self.ln_f = self.layer_class.new_norm(config)

    def cache(self, cache: Cache | None) -> Cache:
        cache = super().cache(cache)
        if self.config.add_cross_attention and not isinstance(cache, EncoderDecoderCache):
            return EncoderDecoderCache(cache, DynamicCache(config=self.config))
        return cache

    def enter(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.drop(inputs_embeds + self.wpe(position_ids))

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        attention_mask: Any = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `DecoderBackbone.forward`; input_ids and token_type_ids may be (B, choices, T), whose rows are flattened.

        token_type_ids: ids whose embeddings are added. encoder_hidden_states (B, S, D): what is attended to besides,
        with encoder_attention_mask (B, S), in a model with `config.add_cross_attention`.
        """
        check_one_input(input_ids, inputs_embeds)
        if encoder_hidden_states is not None and not self.config.add_cross_attention:
            raise ValueError("encoder_hidden_states need cross attention: set config.add_cross_attention=True")
        embeds = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        shape = embeds.shape
        embeds = embeds.reshape(-1, *shape[-2:])
        if token_type_ids is not None:
            embeds = embeds + self.wte(token_type_ids).reshape(-1, *shape[-2:])
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() < 4:
            attention_mask = attention_mask.reshape(embeds.shape[0], -1)
        if encoder_hidden_states is not None:
            kwargs["encoder_hidden_states"] = encoder_hidden_states
            kwargs["encoder_attention_mask"] = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=embeds,
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            )
        outputs = super().forward(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        if len(shape) > 3:
            outputs["last_hidden_state"] = last = outputs.last_hidden_state.view(shape)
            if outputs.hidden_states is not None:
                outputs["hidden_states"] = (*outputs.hidden_states[:-1], last)
        return outputs


_INPUTS = ("input_ids", CACHE, "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")


class GPT2LMHeadModel(CausalLMHead, ArgumentsInOrder, GPT2PreTrainedModel, GenerationMixin):
    backbone_class = GPT2Model
    # `generate` takes those that the signature names
    arguments = (
        *_INPUTS, "encoder_hidden_states", "encoder_attention_mask", "labels", "use_cache", "logits_to_keep"
    )  # fmt: skip
    output_class = CausalLMOutputWithCrossAttentions
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012
    _tp_plan = _pp_plan = _fsdp_plan = None  # transformers has none


class GPT2DoubleHeadsModel(GPT2PreTrainedModel, GenerationMixin):
    """Logits of the next token, and of which of several texts is the right one."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        config.num_labels = 1
        self.transformer = GPT2Model(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.multiple_choice_head = GPT2SequenceSummary(config)
        self.post_init()

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        mc_token_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        mc_labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> GPT2DoubleHeadsModelOutput:
        """input_ids (B, choices, T) -> logits (B, choices, T, vocabulary), mc_logits (B, choices).

        mc_token_ids (B, choices): the token that stands for a text, the last one unless given. labels (B, choices, T),
        mc_labels (B,): the choice. In training the loss of a large vocabulary is computed without the logits, which
        are computed if they are read.
        """
        outputs = self.transformer(
            input_ids,
            **cache_keyword(cache),
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        output_class: Any = GPT2DoubleHeadsModelOutput
        logits: Any = None
        mc_logits = self.multiple_choice_head(hidden_states, mc_token_ids).squeeze(-1)
        loss = mc_loss = None
        if mc_labels is not None:
            mc_loss = nn.functional.cross_entropy(mc_logits.flatten(0, -2), mc_labels.flatten())
        if labels is not None:
            loss = fused_loss_of(self.lm_head, hidden_states, shifted_by_one(labels))
        if loss is not None:
            logits, output_class = DeferredLogits(lambda: linear(self.lm_head, hidden_states)), deferring(output_class)
        else:
            logits = linear(self.lm_head, hidden_states)
            if labels is not None:
                loss = nn.functional.cross_entropy(logits[..., :-1, :].flatten(0, -2), labels[..., 1:].flatten())
        return output_class(
            loss=loss,
            mc_loss=mc_loss,
            logits=logits,
            mc_logits=mc_logits,
            **cache_keyword(cache_of(outputs)),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class GPT2ForSequenceClassification(SequenceClassificationHead, ArgumentsInOrder, GPT2PreTrainedModel):
    backbone_class = GPT2Model
    arguments = (*_INPUTS, "labels", "use_cache")


class GPT2ForTokenClassification(TokenClassificationHead, ArgumentsInOrder, GPT2PreTrainedModel):
    backbone_class = GPT2Model
    arguments = (*_INPUTS, "labels", "use_cache")
    classifier_name = "classifier"


class GPT2ForQuestionAnswering(QuestionAnsweringHead, ArgumentsInOrder, GPT2PreTrainedModel):
    backbone_class = GPT2Model
    arguments = ("input_ids", *_INPUTS[2:], "start_positions", "end_positions")
