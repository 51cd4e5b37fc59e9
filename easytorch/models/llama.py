"""Llama (arXiv:2302.13971, 2307.09288): a decoder of RMSNorm, rotary attention with grouped heads, and a gated MLP.

Class, parameter and argument names are transformers', so its checkpoints, Trainer, PEFT and generate work unchanged.
Legend: B batch, T tokens, D hidden size, H query heads, K key/value heads.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from transformers import Cache, DynamicCache, GenerationMixin, LlamaConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.attention import interface_of
from easytorch.layers.basics import activation, check_one_input, keep_logits
from easytorch.layers.config import attn_implementation
from easytorch.layers.heads import QuestionAnsweringHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.linear import linear
from easytorch.layers.norm import RMSNorm
from easytorch.layers.rotary import RotaryEmbedding, apply_rotary
from easytorch.models._llama_rules import RULES as RULES
from easytorch.protocol.native import NativeModel


class LlamaMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.down_proj, self.act_fn(linear(self.gate_proj, x)) * linear(self.up_proj, x))


class LlamaAttention(nn.Module):
    is_causal = True

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, length, _ = hidden_states.shape
        query = linear(self.q_proj, hidden_states).view(batch, length, -1, self.head_dim)
        key = linear(self.k_proj, hidden_states).view(batch, length, -1, self.head_dim)
        value = linear(self.v_proj, hidden_states).view(batch, length, -1, self.head_dim).transpose(1, 2)
        query, key = apply_rotary(query, key, *position_embeddings)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = interface_of(attn_implementation(self.config))
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs
        )
        return linear(self.o_proj, output.reshape(batch, length, -1)), weights


class LlamaDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        # by keyword, as transformers calls it: hooks and wrappers of the attention look for `hidden_states` there
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LlamaPreTrainedModel(NativeModel):
    config: LlamaConfig
    config_class = LlamaConfig
    base_model_prefix = "model"
    _no_split_modules = ["LlamaDecoderLayer"]  # noqa: RUF012 - transformers copies it into a set
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    head_weights = (r"^(lm_head|score|qa_outputs)\.",)
    _can_record_outputs = {"hidden_states": LlamaDecoderLayer, "attentions": LlamaAttention}  # noqa: RUF012


class LlamaModel(LlamaPreTrainedModel):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """input_ids (B, T) or inputs_embeds (B, T, D) -> last_hidden_state (B, T, D), and the cache when `use_cache`.

        attention_mask: (B, past + T), 1 for tokens and 0 for padding, or (B, 1, T, S) of any pattern. position_ids
        (B, T) that start again within a row mean packed sequences, which do not see each other.
        """
        check_one_input(input_ids, inputs_embeds)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        # only positions the caller gives can pack sequences: for our own the mask need not look (a read on the device)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + past)[None]
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        # generate(assistant_early_exit=n) drafts with the first n layers by lowering the config's number for a while
        for layer in itertools.islice(self.layers, self.config.num_hidden_layers):
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class LlamaForCausalLM(LlamaPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """As `LlamaModel.forward`, and logits (B, T, vocabulary) of the positions `logits_to_keep` names.

        labels (B, T): the tokens themselves, -100 where no loss is taken; the shift by one is done here.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = linear(self.lm_head, keep_logits(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class LlamaForSequenceClassification(SequenceClassificationHead, LlamaPreTrainedModel):
    backbone_class = LlamaModel


class LlamaForTokenClassification(TokenClassificationHead, LlamaPreTrainedModel):
    backbone_class = LlamaModel


class LlamaForQuestionAnswering(QuestionAnsweringHead, LlamaPreTrainedModel):
    base_model_prefix = "transformer"  # the name its checkpoints have on disk
    backbone_class = LlamaModel
