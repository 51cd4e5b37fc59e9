"""Falcon-H1 (arXiv:2507.22448): attention and Mamba 2 in parallel in every layer, with multipliers for each path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import FalconH1Config, GenerationMixin, initialization

from easytorch.cache_names import cache_keyword, state_keyword, takes_cache
from easytorch.layers import mamba2_mixer
from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead
from easytorch.layers.hybrid import HybridBackbone
from easytorch.layers.linear import linear
from easytorch.layers.masks import FULL, LINEAR, Masks, masks_by_layer_type, types_of_config
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.stock_names import given_by, product_of
from easytorch.protocol.native import NativeDecoder

BOTH = "hybrid"  # transformers' name for layers of attention and of a state


class FalconH1Attention(GroupedAttention):
    types_of_layers = staticmethod(types_of_config)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.key_multiplier = config.key_multiplier

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = super().project(hidden_states)
        return query, key * self.key_multiplier, value


class FalconH1Mixer(mamba2_mixer.Mamba2Mixer):
    """The parts of its projection have multipliers of their own; the norm is left out, or comes before the gate."""

    chunk_size = given_by("config.mamba_chunk_size")
    mamba_rms_norm = given_by("config.mamba_rms_norm")
    groups_time_state_size = product_of("n_groups", "ssm_state_size")
    mup_vector: torch.Tensor

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(
            layer_idx,
            hidden_size=config.hidden_size,
            heads=config.mamba_n_heads,
            head_dim=config.mamba_d_head,
            groups=config.mamba_n_groups,
            state_size=config.mamba_d_state,
            conv_kernel=config.mamba_d_conv,
            bias=config.mamba_proj_bias,
            conv_bias=config.mamba_conv_bias,
            act=config.hidden_act,
            eps=config.rms_norm_eps,
            time_step_limit=config.time_step_limit,
        )
        if len(config.ssm_multipliers) != 5:
            raise ValueError(f"falcon_h1: config.ssm_multipliers={config.ssm_multipliers} must be 5 numbers")
        if not config.mamba_rms_norm:
            self.norm = nn.Identity()
        self.norm_before_gate = config.mamba_rms_norm and config.mamba_norm_before_gate
        self.out_proj = nn.Linear(self.parts[0], config.hidden_size, bias=config.projectors_bias)
        self.ssm_in_multiplier, self.ssm_multipliers = config.ssm_in_multiplier, config.ssm_multipliers
        self.register_buffer("mup_vector", self.multipliers(), persistent=False)

    def multipliers(self) -> torch.Tensor:
        """(1, 1, width of in_proj): those of gate, x, B, C and time step."""
        widths = (self.parts[0], *self.convolved, self.parts[2])
        parts = [torch.full((width,), scale) for width, scale in zip(widths, self.ssm_multipliers, strict=True)]
        return torch.cat(parts)[None, None]

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        projected = linear(self.in_proj, hidden_states * self.ssm_in_multiplier) * self.mup_vector
        return projected.split(self.parts, dim=-1)

    def normalize(self, scanned: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normalized = self.norm(scanned)
        return (normalized * F.silu(gate.float())).to(scanned.dtype) if self.norm_before_gate else normalized


class FalconH1MLP(GatedMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias)
        if len(config.mlp_multipliers) != 2:
            raise ValueError(f"falcon_h1: config.mlp_multipliers={config.mlp_multipliers} must be 2 numbers")
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = getattr(self, self.act_name)
        gate = act(linear(self.gate_proj, x) * self.gate_multiplier)
        return linear(self.down_proj, linear(self.up_proj, x) * gate) * self.down_multiplier


class FalconH1DecoderLayer(DecoderLayer):
    """x + mamba(norm(x)) + attention(norm(x)), then x + feed_forward(norm(x)), each path with its multipliers."""

    attention_class = FalconH1Attention
    norms = ("input_layernorm", "pre_ff_layernorm")

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.attention_in_multiplier = config.attention_in_multiplier
        self.attn_out_multiplier, self.ssm_out_multiplier = config.attention_out_multiplier, config.ssm_out_multiplier
        self.feed_forward = FalconH1MLP(config)
        self.mamba = FalconH1Mixer(config, layer_idx)
        self.self_attn = attention = self.attention_class(config, layer_idx)
        self.channels_attn = (attention.num_heads + 2 * attention.num_key_value_heads) * attention.head_dim
        for name in self.norms:
            setattr(self, name, self.new_norm(config))

    @takes_cache
    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: Masks, cache: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        normalized = self.input_layernorm(hidden_states)
        mixed = self.mamba(normalized, **state_keyword(cache), attention_mask=attention_mask[LINEAR], **kwargs)
        attended, _ = self.self_attn(
            hidden_states=normalized * self.attention_in_multiplier,
            attention_mask=attention_mask[FULL],
            **cache_keyword(cache),
            **kwargs,
        )
        attended = attended * self.attn_out_multiplier
        hidden_states = hidden_states + (mixed * self.ssm_out_multiplier + attended)
        return hidden_states + self.feed_forward(self.pre_ff_layernorm(hidden_states))  # type: ignore[operator]


class FalconH1PreTrainedModel(NativeDecoder):
    config: FalconH1Config
    config_class = FalconH1Config
    _no_split_modules = ["FalconH1DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": FalconH1DecoderLayer, "attentions": FalconH1Attention}  # noqa: RUF012
    _is_stateful = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, FalconH1Mixer):
            module.reset_decays()
            initialization.ones_(module.dt_bias)
            initialization.copy_(module.mup_vector, module.multipliers())


class FalconH1Model(DecoderBackbone, FalconH1PreTrainedModel):
    layer_class = FalconH1DecoderLayer
    norm_name = "final_layernorm"
    masks_of: ClassVar[Mapping[str, Any]] = {BOTH: HybridBackbone.masks_of}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding_multiplier, self.lm_head_multiplier = config.embedding_multiplier, config.lm_head_multiplier

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids) * self.embedding_multiplier

    def make_masks(self, inputs_embeds: torch.Tensor, *given: Any) -> Masks:
        both = self.masks_of[BOTH]
        make: Callable[..., Masks] = masks_by_layer_type  # `given` is fewer arguments than mypy takes it for
        return {BOTH: make(self.config, tuple(both), inputs_embeds, *given, masks_of=both)}


class FalconH1ForCausalLM(CausalLMHead, FalconH1PreTrainedModel, GenerationMixin):
    backbone_class = FalconH1Model

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * self.model.lm_head_multiplier

    def logits_finish(self) -> tuple[float, float | None]:
        return self.model.lm_head_multiplier, None

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        kwargs["logits_to_keep"] = self.config.num_logits_to_keep
        prepare: Any = super().prepare_inputs_for_generation
        return prepare(input_ids, **kwargs)
