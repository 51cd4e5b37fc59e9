"""Mixtral (arXiv:2401.04088): Mistral's decoder with experts; each token is routed to two."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import GenerationMixin, MixtralConfig, PreTrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.experts import Experts
from easytorch.layers.heads import QuestionAnsweringHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.moe_heads import BalancedCausalLMHead
from easytorch.layers.routers import SoftmaxRouter
from easytorch.layers.sparse_moe import SparseMoe, jitter
from easytorch.layers.stock_names import given_by
from easytorch.models.mistral import MistralAttention
from easytorch.protocol.native import NativeMoeDecoder


class MixtralAttention(MistralAttention):
    pass


class MixtralExperts(Experts):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_local_experts, config.intermediate_size)


class MixtralTopKRouter(SoftmaxRouter):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_local_experts, normalized=True, rounded=False)


class MixtralSparseMoeBlock(SparseMoe):
    top_k = given_by("gate.top_k")
    router_class: ClassVar[type[Any]] = MixtralTopKRouter
    experts_class: ClassVar[type[Any]] = MixtralExperts

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.jitter_noise = config.router_jitter_noise

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        noisy = self.training and self.jitter_noise > 0
        return super().forward(jitter(hidden_states, self.jitter_noise) if noisy else hidden_states)


class MixtralDecoderLayer(DecoderLayer):
    attention_class = MixtralAttention
    mlp_class = MixtralSparseMoeBlock


class MixtralPreTrainedModel(NativeMoeDecoder):
    config: MixtralConfig
    config_class = MixtralConfig
    _no_split_modules = ["MixtralDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(MixtralTopKRouter, index=0),
        "hidden_states": MixtralDecoderLayer,
        "attentions": MixtralAttention,
    }


class MixtralModel(DecoderBackbone, MixtralPreTrainedModel):
    layer_class = MixtralDecoderLayer
    output_class = MoeModelOutputWithPast


class MixtralForCausalLM(BalancedCausalLMHead, MixtralPreTrainedModel, GenerationMixin):
    backbone_class = MixtralModel


class MixtralForSequenceClassification(SequenceClassificationHead, MixtralPreTrainedModel):
    backbone_class = MixtralModel


class MixtralForTokenClassification(TokenClassificationHead, MixtralPreTrainedModel):
    backbone_class = MixtralModel


class MixtralForQuestionAnswering(QuestionAnsweringHead, MixtralPreTrainedModel):
    backbone_class = MixtralModel
