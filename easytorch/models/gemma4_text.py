"""Gemma 4's text model: Gemma 3's layers with heads of two widths, per-layer embeddings, shared keys, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache, Gemma4TextConfig, GenerationMixin, initialization
from transformers.cache_utils import KVSharingDict
from transformers.models.gemma4.modeling_gemma4 import Gemma4CausalLMOutputWithPast, Gemma4TextModelOutputWithPast
from transformers.utils.generic import ModelOutput
from transformers.utils.output_capturing import OutputRecorder

from easytorch.cache_names import CACHE, takes_cache
from easytorch.layers.basics import check_one_input
from easytorch.layers.config import attn_implementation, wants_attentions
from easytorch.layers.decoder import PrePostNormLayer
from easytorch.layers.embedding import ScaledBackbone
from easytorch.layers.experts import Experts
from easytorch.layers.heads import SoftcappedCausalLMHead
from easytorch.layers.linear import linear
from easytorch.layers.masks import Masks, types_of_config
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.norm import Float32RMSNorm, PlainRMSNorm
from easytorch.layers.per_layer_embedding import PerLayerEmbedding, PerLayerInput
from easytorch.layers.rotary import LayerTypeRotaryEmbedding
from easytorch.layers.shared_keys import SharedKeysAttention, check_sharing, without_reentrant_checkpoints
from easytorch.protocol.native import NativeMoeDecoder

# What a device map keeps on one device, whichever part of the model is asked.
NO_SPLIT = ["Gemma4TextDecoderLayer", "Gemma4VisionEncoderLayer", "Gemma4VisionPatchEmbedder", "Gemma4AudioLayer"]


class Gemma4TextMLP(GatedMLP):
    """Twice as wide in layers without keys of their own, if the config says so."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        wide = config.use_double_wide_mlp and config.kv_sharing_modes[layer_idx] == "reuse"
        width = config.intermediate_size * (2 if wide else 1)
        super().__init__(config.hidden_size, width, config.hidden_activation)


class Gemma4TextAttention(SharedKeysAttention):
    """Queries, keys and values are normalised head by head. The value may be the key as it was before its norm."""

    types_of_layers = staticmethod(types_of_config)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, scaling=1.0)
        self.is_causal = config.use_bidirectional_attention != "all"

    def make_projections(self, bias: bool, out_bias: bool) -> None:
        self.set_sharing()
        self.use_alternative_attention = self.config.attention_k_eq_v and not self.is_sliding
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        width, kv_width = (heads * self.head_dim for heads in (self.num_heads, self.num_key_value_heads))
        self.q_proj = nn.Linear(hidden, width, bias=bias)
        self.q_norm = Float32RMSNorm(self.head_dim, eps)
        self.fused = ("q_proj",)
        if not self.reads:
            self.k_norm, self.v_norm = Float32RMSNorm(self.head_dim, eps), PlainRMSNorm(eps)
            self.k_proj = nn.Linear(hidden, kv_width, bias=bias)
            one = self.use_alternative_attention
            self.v_proj = None if one else nn.Linear(hidden, kv_width, bias=bias)  # type: ignore[assignment]
            self.fused = ("q_proj", "k_proj") if one else ("q_proj", "k_proj", "v_proj")
        self.o_proj = nn.Linear(width, hidden, bias=out_bias)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, *rest = (one.unflatten(-1, (-1, self.head_dim)) for one in self.projections(hidden_states))
        if self.reads:
            return (self.q_norm(query),)
        return self.q_norm(query), self.k_norm(rest[0]), self.v_norm(rest[-1])


class Gemma4TextExperts(Experts):
    def __init__(self, config: Any) -> None:
        super().__init__(config, config.num_experts, config.moe_intermediate_size, act=config.hidden_activation)


class Gemma4TextRouter(nn.Module):
    """The k largest of a softmax in float32, made to sum to one, each times a learned scale of its expert."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k = config.top_k_experts
        if not all(isinstance(one, int) for one in (self.top_k, config.num_experts, config.moe_intermediate_size)):
            raise ValueError(
                f"{config.model_type}: config.enable_moe_block needs the numbers num_experts, top_k_experts and "
                f"moe_intermediate_size; they are {config.num_experts}, {self.top_k} and {config.moe_intermediate_size}"
            )
        if not 1 <= self.top_k <= config.num_experts:
            raise ValueError(
                f"{config.model_type}: config.top_k_experts={self.top_k} must be 1 to num_experts={config.num_experts}"
            )
        self.norm = PlainRMSNorm(config.rms_norm_eps)
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(N, D) -> probabilities (N, E), weights (N, k), indices (N, k)."""
        scaled = self.norm(hidden_states) * self.scale * self.scale.shape[0] ** -0.5
        probabilities = linear(self.proj, scaled).softmax(dim=-1, dtype=torch.float32)
        weights, indices = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return probabilities, weights * self.per_expert_scale[indices], indices


class Gemma4TextDecoderLayer(PerLayerInput, PrePostNormLayer):
    """Gemma 3's; experts beside the MLP, the layer's part of the tokens, and a factor of all of it."""

    attention_class = Gemma4TextAttention
    mlp_class = Gemma4TextMLP
    norm_class = Float32RMSNorm
    of_experts = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
    post_feedforward_layernorm_1: nn.Module
    post_feedforward_layernorm_2: nn.Module
    pre_feedforward_layernorm_2: nn.Module
    layer_scalar: torch.Tensor

    def add_modules(self, config: Any, layer_idx: int) -> None:
        super().add_modules(config, layer_idx)
        self.layer_idx = layer_idx
        self.register_buffer("layer_scalar", torch.ones(1))
        self.add_per_layer_modules(config)
        self.enable_moe_block = config.enable_moe_block
        if self.enable_moe_block:
            self.router, self.experts = Gemma4TextRouter(config), Gemma4TextExperts(config)
            for name in self.of_experts:
                setattr(self, name, self.new_norm(config))

    def new_mlp(self, config: Any, layer_idx: int) -> nn.Module:
        return self.mlp_class(config, layer_idx)

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D): the MLP, and the experts beside it, each behind norms of its own."""
        mixed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        if not self.enable_moe_block:
            return mixed
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, indices = self.router(rows)
        of_experts: torch.Tensor = self.experts(self.pre_feedforward_layernorm_2(rows), indices, weights)
        of_experts = self.post_feedforward_layernorm_2(of_experts.view_as(hidden_states))
        return self.post_feedforward_layernorm_1(mixed) + of_experts

    def __call__(
        self, hidden_states: torch.Tensor, *args: Any, per_layer_inputs: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if per_layer_inputs is not None:  # by position, as a checkpoint that is reentrant wants what has gradients
            args = (per_layer_inputs[:, :, self.layer_idx], *args)
        output: torch.Tensor = super().__call__(hidden_states, *args, **kwargs)
        return output

    def forward(
        self, hidden_states: torch.Tensor, per_layer_input: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """per_layer_input (B, T, P): the layer's part of the tokens."""
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        hidden_states = hidden_states + self.post_feedforward_layernorm(self.feed_forward(hidden_states))
        return self.mix(hidden_states, per_layer_input) * self.layer_scalar


class Gemma4PreTrainedModel(NativeMoeDecoder):
    config: Gemma4TextConfig
    config_class = Gemma4TextConfig
    _no_split_modules = NO_SPLIT
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(Gemma4TextRouter, index=0),
        "hidden_states": Gemma4TextDecoderLayer,
        "attentions": Gemma4TextAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Gemma4TextRouter):
            initialization.ones_(module.scale)
            initialization.ones_(module.per_expert_scale)
        if isinstance(module, Gemma4TextDecoderLayer):
            initialization.ones_(module.layer_scalar)

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        super()._set_gradient_checkpointing(enable, *args, **kwargs)
        if enable:
            without_reentrant_checkpoints(self)

    def get_per_layer_input_embeddings(self) -> nn.Module:
        """The embedding with a part for each layer."""
        backbone: Any = self.base_model
        embedding: nn.Module = backbone.embed_tokens_per_layer
        return embedding

    def set_per_layer_input_embeddings(self, value: nn.Module) -> None:
        self.base_model.embed_tokens_per_layer = value

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As transformers', of both embeddings."""
        embedding: nn.Embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        text = self.config.get_text_config()
        text.vocab_size_per_layer_input = embedding.num_embeddings
        if text.hidden_size_per_layer_input:
            before: Any = self.get_per_layer_input_embeddings()
            grown: Any = self._get_resized_embeddings(before, new_num_tokens, pad_to_multiple_of, mean_resizing)
            self.set_per_layer_input_embeddings(grown.requires_grad_(before.weight.requires_grad))
        return embedding


class Gemma4TextModel(PerLayerEmbedding, ScaledBackbone, Gemma4PreTrainedModel):
    layer_class = Gemma4TextDecoderLayer
    rotary_class = LayerTypeRotaryEmbedding
    output_class = Gemma4TextModelOutputWithPast

    def __init__(self, config: Any) -> None:
        check_sharing(config)
        super().__init__(config)
        self.first_kv_shared_layer_idx = config.num_hidden_layers - config.num_kv_shared_layers
        # checkpoints have these weights, which nothing reads
        readers = [index for index, mode in enumerate(config.kv_sharing_modes) if mode == "reuse"]
        unread = ("k_proj", "v_proj", "k_norm", "v_norm")
        self._keys_to_ignore_on_load_unexpected = {
            rf"layers\.{index}\.self_attn\.{name}" for index in readers for name in unread
        }

    def add_modules(self, config: Any) -> None:
        super().add_modules(config)
        self.add_per_layer_modules(config)

    @takes_cache
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        per_layer_inputs: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        shared_kv_states: Any = None,
        return_shared_kv_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As other decoders'; per_layer_inputs (B, T, L, P): what `get_per_layer_inputs` gives, beside inputs_embeds.

        logits_to_keep: layers without keys of their own run at the last positions alone where no others are asked for,
        and then so is last_hidden_state. shared_kv_states: what layers before these have given. It is returned with
        return_shared_kv_states.
        """
        check_one_input(input_ids, inputs_embeds)
        if input_ids is not None and per_layer_inputs is not None:
            raise ValueError("You cannot specify per_layer_inputs if input_ids is provided")
        if inputs_embeds is None:
            embedding: Any = self.embed_tokens
            inputs_embeds = embedding(input_ids)
        if self.hidden_size_per_layer_input:
            if per_layer_inputs is None:
                per_layer_inputs = self.get_per_layer_inputs(input_ids, inputs_embeds)
            per_layer_inputs = self.project_per_layer_inputs(inputs_embeds, per_layer_inputs)
        shared = shared_kv_states if isinstance(shared_kv_states, KVSharingDict) else KVSharingDict(shared_kv_states)
        outputs = super().forward(
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            per_layer_inputs=per_layer_inputs,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            shared_kv_states=shared,
            **kwargs,
        )
        if return_shared_kv_states and isinstance(outputs, ModelOutput):
            outputs.shared_kv_states = shared
        return outputs

    def run_layers(
        self,
        hidden_states: torch.Tensor,
        masks: Masks,
        positions: Mapping[str, Any],
        *,
        logits_to_keep: int | torch.Tensor = 0,
        per_layer_inputs: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Layers without keys of their own look at no other position: they run at those whose logits are wanted."""
        middle = self.first_kv_shared_layer_idx
        if not self._only_last(hidden_states, masks, logits_to_keep, kwargs):
            return super().run_layers(hidden_states, masks, positions, per_layer_inputs=per_layer_inputs, **kwargs)
        hidden_states = super().run_layers(
            hidden_states, masks, positions, last=middle, per_layer_inputs=per_layer_inputs, **kwargs
        )
        last = slice(-int(logits_to_keep), None)
        return super().run_layers(
            hidden_states[:, last],
            {name: None if mask is None else mask[..., last, :] for name, mask in masks.items()},
            {name: (cos[:, last], sin[:, last]) for name, (cos, sin) in positions.items()},
            first=middle,
            per_layer_inputs=None if per_layer_inputs is None else per_layer_inputs[:, last],
            **kwargs,
        )

    def _only_last(
        self, hidden_states: torch.Tensor, masks: Masks, logits_to_keep: int | torch.Tensor, kwargs: dict[str, Any]
    ) -> bool:
        if not isinstance(logits_to_keep, int) or not 0 < logits_to_keep < hidden_states.shape[1]:
            return False
        if self.first_kv_shared_layer_idx >= self.config.num_hidden_layers:
            return False
        recorded = ("output_hidden_states", "output_attentions", "output_router_logits")
        if wants_attentions(self.config) or any(kwargs.get(name) or getattr(self.config, name, 0) for name in recorded):
            return False
        if attn_implementation(self.config) not in ("easytorch", "sdpa", "vanilla", "eager", "flash"):
            return False  # masks of others are not tensors
        # without a mask the last of several queries would be taken for the first, as in a cache that is allocated ahead
        unmasked = any(mask is None for mask in masks.values())
        ahead = getattr(kwargs.get(CACHE), "is_compileable", False)
        return not (unmasked and (logits_to_keep > 1 or ahead))


class Gemma4ForCausalLM(SoftcappedCausalLMHead, Gemma4PreTrainedModel, GenerationMixin):
    backbone_class = Gemma4TextModel
    backbone_arguments = ("per_layer_inputs", "shared_kv_states", "return_shared_kv_states")
    backbone_keeps = True
    output_class = Gemma4CausalLMOutputWithPast
