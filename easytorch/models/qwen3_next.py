"""Qwen3-Next: three layers of Gated DeltaNet to one of attention with a gate, and Qwen 2 MoE's experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, Qwen3NextConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.gated_delta_net import GatedDeltaNet
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import QuestionAnsweringHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.hybrid import HybridBackbone, HybridLayer
from easytorch.layers.linear import linear
from easytorch.layers.masks import types_of_config
from easytorch.layers.moe_heads import BalancedCausalLMHead
from easytorch.layers.norm import ZeroCenteredRMSNorm
from easytorch.models.qwen2_moe import Qwen2MoeDecoderLayer, Qwen2MoeTopKRouter
from easytorch.protocol.native import NativeMoeDecoder


class Qwen3NextAttention(GroupedAttention):
    """Queries and keys are normalized head by head; a gate beside each query multiplies what it attended to."""

    types_of_layers = staticmethod(types_of_config)

    def make_projections(self, bias: bool, out_bias: bool) -> None:
        super().make_projections(bias, out_bias)
        self.q_proj = nn.Linear(self.config.hidden_size, 2 * self.num_heads * self.head_dim, bias=bias)
        self.q_norm = ZeroCenteredRMSNorm(self.head_dim, eps=self.config.rms_norm_eps)
        self.k_norm = ZeroCenteredRMSNorm(self.head_dim, eps=self.config.rms_norm_eps)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, gate = linear(self.q_proj, hidden_states).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        key = linear(self.k_proj, hidden_states).unflatten(-1, (-1, self.head_dim))
        value = linear(self.v_proj, hidden_states).unflatten(-1, (-1, self.head_dim))
        return self.q_norm(query), self.k_norm(key), value, gate.flatten(2)

    def project_output(self, attended: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return super().project_output(attended * rest[0].sigmoid())


class Qwen3NextGatedDeltaNet(GatedDeltaNet):
    """Query, key, value and gate are stored head by head, as are b and a."""

    def add_modules(self, config: Any) -> None:
        hidden, width = config.hidden_size, sum(self.convolved) + self.value_heads * self.value_width
        self.in_proj_qkvz = nn.Linear(hidden, width, bias=False)
        self.in_proj_ba = nn.Linear(hidden, 2 * self.value_heads, bias=False)
        super().add_modules(config)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shared = self.value_heads // self.heads
        parts = [self.key_width, self.key_width, shared * self.value_width, shared * self.value_width]
        heads = linear(self.in_proj_qkvz, hidden_states).unflatten(-1, (self.heads, -1))
        query, key, value, gate = heads.split(parts, dim=-1)
        b, a = linear(self.in_proj_ba, hidden_states).unflatten(-1, (self.heads, -1)).chunk(2, dim=-1)
        x = torch.cat([query.flatten(2), key.flatten(2), value.flatten(2)], dim=-1)
        return x, gate.flatten(2).unflatten(-1, (self.value_heads, -1)), b.flatten(2), a.flatten(2)


class Qwen3NextDecoderLayer(HybridLayer, Qwen2MoeDecoderLayer):
    attention_class = Qwen3NextAttention
    linear_class = Qwen3NextGatedDeltaNet
    norm_class = ZeroCenteredRMSNorm


class Qwen3NextPreTrainedModel(NativeMoeDecoder):
    config: Qwen3NextConfig
    config_class = Qwen3NextConfig
    _no_split_modules = ["Qwen3NextDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(Qwen2MoeTopKRouter, index=0),
        "hidden_states": Qwen3NextDecoderLayer,
        "attentions": Qwen3NextAttention,
    }
    _is_stateful = True
    _keys_to_ignore_on_load_unexpected = [r"^mtp.*"]  # noqa: RUF012 - layers of multi-token prediction

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GatedDeltaNet):
            module.reset_parameters()


class Qwen3NextModel(HybridBackbone, Qwen3NextPreTrainedModel):
    layer_class = Qwen3NextDecoderLayer
    output_class = MoeModelOutputWithPast


class Qwen3NextForCausalLM(BalancedCausalLMHead, Qwen3NextPreTrainedModel, GenerationMixin):
    backbone_class = Qwen3NextModel


class Qwen3NextForSequenceClassification(SequenceClassificationHead, Qwen3NextPreTrainedModel):
    backbone_class = Qwen3NextModel


class Qwen3NextForTokenClassification(TokenClassificationHead, Qwen3NextPreTrainedModel):
    backbone_class = Qwen3NextModel


class Qwen3NextForQuestionAnswering(QuestionAnsweringHead, Qwen3NextPreTrainedModel):
    base_model_prefix = "transformer"  # the name its checkpoints have on disk
    backbone_class = Qwen3NextModel
