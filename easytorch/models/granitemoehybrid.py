"""Granite 4: Granite's decoder with Mamba 2 in most layers, and experts beside a shared MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, GraniteMoeHybridConfig, initialization
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.cache_names import cache_keyword, state_keyword, takes_cache
from easytorch.layers import mamba2_mixer
from easytorch.layers.basics import activation
from easytorch.layers.decoder import DecoderLayer
from easytorch.layers.gate import gated
from easytorch.layers.hybrid import HybridBackbone
from easytorch.layers.linear import linear
from easytorch.layers.masks import LINEAR, types_of_config
from easytorch.layers.rotary import RotaryEmbedding
from easytorch.layers.stock_names import given_by
from easytorch.models.granite import GraniteAttention
from easytorch.models.granitemoe import GraniteMoeHead, GraniteMoeMoE, GraniteMoeTopKRouter
from easytorch.protocol.native import NativeMoeDecoder


class GraniteMoeHybridAttention(GraniteAttention):
    types_of_layers = staticmethod(types_of_config)


class GraniteMoeHybridMambaLayer(mamba2_mixer.Mamba2Mixer):
    chunk_size = given_by("config.mamba_chunk_size")

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


class GraniteMoeHybridMLP(nn.Module):
    """output(act(gate) * up), gate and up stored as one: (B, T, D) -> (B, T, D)."""

    input_size = given_by("config.hidden_size")
    hidden_size = given_by("config.shared_intermediate_size")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.activation = activation(config.hidden_act)
        self.input_linear = nn.Linear(config.hidden_size, 2 * config.shared_intermediate_size, bias=False)
        self.output_linear = nn.Linear(config.shared_intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = linear(self.input_linear, hidden_states).chunk(2, dim=-1)
        return linear(self.output_linear, gated(self.activation, gate, up))


class GraniteMoeHybridDecoderLayer(DecoderLayer):
    mamba: Any
    self_attn: Any
    attention_class = GraniteMoeHybridAttention

    def add_modules(self, config: Any, layer_idx: int) -> None:
        for name in self.norms:
            setattr(self, name, self.new_norm(config))
        self.block_sparse_moe = GraniteMoeMoE(config) if config.num_local_experts > 0 else None
        self.shared_mlp = GraniteMoeHybridMLP(config)
        self.block_type, self.has_experts = config.layer_types[layer_idx], config.num_local_experts > 0
        self.is_linear = self.block_type == LINEAR
        if self.is_linear:
            self.self_attn, self.mamba = None, GraniteMoeHybridMambaLayer(config, layer_idx)
        else:
            self.self_attn, self.mamba = self.attention_class(config, layer_idx), None
        self.residual_multiplier = config.residual_multiplier

    @takes_cache
    def forward(self, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> torch.Tensor:
        normalized = self.input_layernorm(hidden_states)
        if self.is_linear:
            mixed = self.mamba(normalized, **state_keyword(cache), **kwargs)
        else:
            mixed, _ = self.self_attn(hidden_states=normalized, **cache_keyword(cache), **kwargs)
        hidden_states = hidden_states + mixed * self.residual_multiplier
        normalized = self.post_attention_layernorm(hidden_states)
        fed = self.shared_mlp(normalized)
        if self.block_sparse_moe is not None:
            fed = self.block_sparse_moe(normalized) + fed
        return hidden_states + fed * self.residual_multiplier


class GraniteMoeHybridPreTrainedModel(NativeMoeDecoder):
    config: GraniteMoeHybridConfig
    config_class = GraniteMoeHybridConfig
    least_counts = {"num_local_experts": 0}  # noqa: RUF012 - without experts every layer has the MLP that all share
    _no_split_modules = ["GraniteMoeHybridDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(GraniteMoeTopKRouter, index=0),
        "hidden_states": GraniteMoeHybridDecoderLayer,
        "attentions": GraniteMoeHybridAttention,
    }
    _is_stateful = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GraniteMoeHybridMambaLayer):
            module.reset_decays()
            initialization.ones_(module.dt_bias)


class GraniteMoeHybridModel(HybridBackbone, GraniteMoeHybridPreTrainedModel):
    layer_class = GraniteMoeHybridDecoderLayer
    output_class = MoeModelOutputWithPast
    rotary_class = RotaryEmbedding

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding_multiplier = config.embedding_multiplier
        if config.position_embedding_type != "rope":
            self.rotary_emb = None

    def enter(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return inputs_embeds * self.embedding_multiplier


class GraniteMoeHybridForCausalLM(GraniteMoeHead, GraniteMoeHybridPreTrainedModel, GenerationMixin):
    backbone_class = GraniteMoeHybridModel

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.logits_scaling = config.logits_scaling

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.logits_scaling

    def logits_finish(self) -> tuple[float, float | None]:
        return 1.0 / self.logits_scaling, None
