"""Kimi Linear (arXiv:2510.26692): Kimi Delta Attention, layers of latent attention without positions, and experts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin, KimiLinearConfig, PreTrainedConfig, initialization
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.cache_names import takes_states
from easytorch.layers.basics import activation
from easytorch.layers.experts import Experts
from easytorch.layers.fused_linear import FusedProjections
from easytorch.layers.gated_delta_net import gated_delta_rule, log_decays
from easytorch.layers.hybrid import HybridBackbone, HybridLayer
from easytorch.layers.kept_in_float32 import dtype_of, kept_in_float32
from easytorch.layers.latent_attention import LatentAttention
from easytorch.layers.linear import linear
from easytorch.layers.masks import types_of_config
from easytorch.layers.moe_heads import MoeCausalLMHead
from easytorch.layers.norm import RMSNorm, rms_norm
from easytorch.layers.recurrent import convolve, per_sequence, recurrent_state, segments, without_padding
from easytorch.layers.routers import GroupedSigmoidRouter
from easytorch.layers.stock_names import given_by, of_layer, product_of, same_as
from easytorch.models.glm4_moe import Glm4MoeMLP, Glm4MoeMoE
from easytorch.protocol.native import NativeMoeDecoder


class KimiLinearAttention(LatentAttention):
    """Latent attention without positions: the part that all keys share is not rotated."""

    types_of_layers = staticmethod(types_of_config)

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


class KimiLinearRMSNormGated(RMSNorm):
    """rms_norm(x) * sigmoid(gate), the product in float32: (..., Dv) -> (..., Dv)."""

    activation = "sigmoid"

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        normalized = rms_norm(hidden_states.float(), self.weight.float(), self.variance_epsilon)
        return (normalized * gate.float().sigmoid()).to(hidden_states.dtype)


class KimiLinearForgetGate(nn.Module):
    """The logarithm of the decay of every channel of a key, float32: (B, T, D) -> (B, T, H, Dk)."""

    head_dim = same_as("width")
    num_heads = same_as("heads")
    qkv_dim = product_of("heads", "width")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.width = config.linear_num_heads, config.linear_head_dim
        self.f_a_proj = nn.Linear(config.hidden_size, self.width, bias=False)
        self.f_b_proj = nn.Linear(self.width, self.heads * self.width, bias=False)
        made = dtype_of("dt_bias", "KimiLinearPreTrainedModel")
        self.dt_bias = nn.Parameter(torch.empty(self.heads * self.width, dtype=made))
        self.A_log = nn.Parameter(torch.empty(1, 1, self.heads, 1))

    def reset_parameters(self) -> None:
        initialization.copy_(self.A_log, torch.empty_like(self.A_log).uniform_(1.0, 16.0).log())
        steps = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp().clamp_min(1e-4)
        initialization.copy_(self.dt_bias, steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        steps = linear(self.f_b_proj, linear(self.f_a_proj, hidden_states)).float() + self.dt_bias.float()
        return log_decays(self.A_log, steps.unflatten(-1, (self.heads, self.width)))


class KimiLinearDeltaAttention(FusedProjections):
    """The gated delta rule with a decay for each channel of the keys (section 3): (B, T, D) -> (B, T, D).

    Legend: B batch, T tokens, D hidden size, H heads, Dk the width of queries, keys and values.
    """

    hidden_size = given_by("config.hidden_size")
    num_heads = given_by("config.linear_num_heads")
    head_dim = same_as("width")
    qkv_dim = product_of("num_heads", "width")
    conv_dim = given_by("conv1d.out_channels")
    conv_kernel_size = given_by("config.linear_conv_kernel_dim")
    layer_norm_epsilon = given_by("config.rms_norm_eps")
    layer_type = of_layer("config.layer_types")
    fused = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        activation(config.hidden_act)  # refused here by name, not at the first token
        self.layer_idx, self.activation = layer_idx, config.hidden_act
        hidden, self.width = config.hidden_size, config.linear_head_dim
        channels, kernel = config.linear_num_heads * self.width, config.linear_conv_kernel_dim
        for name in self.fused:
            setattr(self, name, nn.Linear(hidden, channels, bias=False))
        self.conv1d = nn.Conv1d(3 * channels, 3 * channels, kernel, groups=3 * channels, padding=kernel - 1, bias=False)
        self.forget_gate = KimiLinearForgetGate(config)
        self.b_proj = nn.Linear(hidden, config.linear_num_heads, bias=False)
        self.g_a_proj = nn.Linear(hidden, self.width, bias=False)
        self.g_b_proj = nn.Linear(self.width, channels, bias=False)
        self.o_norm = KimiLinearRMSNormGated(self.width, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(channels, hidden, bias=False)
        self.lay_projections()

    @takes_states
    @force_accelerate_hooks("conv1d")
    @per_sequence
    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """attention_mask (B, T): 0 for padding. seq_idx (B, T), or cu_seq_lens_q (N + 1,): packed sequences."""
        state = recurrent_state(cache, self.layer_idx)
        packed = segments(seq_idx, cu_seq_lens_q, hidden_states)
        hidden_states = without_padding(hidden_states, attention_mask)
        x = torch.cat(self.projections(hidden_states), dim=-1)
        x = convolve(self.conv1d, x, self.activation, cache, self.layer_idx, packed)
        query, key, value = x.unflatten(-1, (3, -1, self.width)).unbind(2)
        ruled = gated_delta_rule(
            query,
            key,
            value,
            self.forget_gate(hidden_states),
            linear(self.b_proj, hidden_states).sigmoid(),
            initial_state=state,
            use_qk_l2norm=True,
            segment_ids=packed,
        )
        if cache is not None:
            cache.update_recurrent_state(ruled.final_state, self.layer_idx)
        gate = linear(self.g_b_proj, linear(self.g_a_proj, hidden_states)).unflatten(-1, (-1, self.width))
        return linear(self.o_proj, self.o_norm(ruled.outputs, gate).flatten(-2))


class KimiLinearMLP(Glm4MoeMLP):
    pass


class KimiLinearExperts(Experts):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_local_experts, config.moe_intermediate_size)


class KimiLinearTopkRouter(GroupedSigmoidRouter):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_local_experts)


class KimiLinearMoE(Glm4MoeMoE):
    router_class = KimiLinearTopkRouter
    experts_class = KimiLinearExperts
    mlp_class = KimiLinearMLP


class KimiLinearDecoderLayer(HybridLayer):
    attention_class = KimiLinearAttention
    linear_class = KimiLinearDeltaAttention
    linear_name = "self_attn"

    def new_mlp(self, config: Any, layer_idx: int) -> nn.Module:
        kinds = config.mlp_layer_types
        if len(kinds) != config.num_hidden_layers or not set(kinds) <= {"dense", "sparse"}:
            raise ValueError(
                f"kimi_linear: config.mlp_layer_types={kinds} must say dense or sparse for each of the "
                f"{config.num_hidden_layers} layers"
            )
        dense = kinds[layer_idx] == "dense"
        return KimiLinearMLP(config, config.intermediate_size) if dense else KimiLinearMoE(config)


class KimiLinearPreTrainedModel(NativeMoeDecoder):
    config: KimiLinearConfig
    config_class = KimiLinearConfig
    _no_split_modules = ["KimiLinearDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(KimiLinearTopkRouter, index=0),
        "hidden_states": KimiLinearDecoderLayer,
        "attentions": KimiLinearAttention,
    }
    _keep_in_fp32_modules_strict = kept_in_float32("KimiLinearPreTrainedModel")
    _is_stateful = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, KimiLinearForgetGate):
            module.reset_parameters()


class KimiLinearModel(HybridBackbone, KimiLinearPreTrainedModel):
    layer_class = KimiLinearDecoderLayer
    rotary_class = None
    output_class = MoeModelOutputWithPast


class KimiLinearForCausalLM(MoeCausalLMHead, KimiLinearPreTrainedModel, GenerationMixin):
    backbone_class = KimiLinearModel
    _tied_weights_keys = {}  # noqa: RUF012 - whatever tie_word_embeddings says, as in transformers
