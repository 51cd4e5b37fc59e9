"""Qwen 3 MoE (arXiv:2505.09388): Qwen 3's attention, and experts in place of most of its MLPs."""

from __future__ import annotations

from transformers import GenerationMixin, PreTrainedConfig, Qwen3MoeConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.experts import Experts
from easytorch.layers.heads import QuestionAnsweringHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.masks import all_within_window
from easytorch.layers.moe_heads import BalancedCausalLMHead
from easytorch.layers.routers import SoftmaxRouter
from easytorch.layers.sparse_moe import SparseMoe
from easytorch.models.qwen2_moe import Qwen2MoeDecoderLayer
from easytorch.models.qwen3 import Qwen3Attention
from easytorch.protocol.native import NativeMoeDecoder


class Qwen3MoeAttention(Qwen3Attention):
    types_of_layers = staticmethod(all_within_window)


class Qwen3MoeExperts(Experts):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_experts, config.moe_intermediate_size)


class Qwen3MoeTopKRouter(SoftmaxRouter):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_experts, normalized=config.norm_topk_prob, rounded=True)


class Qwen3MoeSparseMoeBlock(SparseMoe):
    order = ("experts", "gate")
    router_class = Qwen3MoeTopKRouter
    experts_class = Qwen3MoeExperts


class Qwen3MoeDecoderLayer(Qwen2MoeDecoderLayer):
    attention_class = Qwen3MoeAttention
    moe_class = Qwen3MoeSparseMoeBlock


class Qwen3MoePreTrainedModel(NativeMoeDecoder):
    config: Qwen3MoeConfig
    config_class = Qwen3MoeConfig
    _no_split_modules = ["Qwen3MoeDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(Qwen3MoeTopKRouter, index=0),
        "hidden_states": Qwen3MoeDecoderLayer,
        "attentions": Qwen3MoeAttention,
    }


class Qwen3MoeModel(DecoderBackbone, Qwen3MoePreTrainedModel):
    layer_class = Qwen3MoeDecoderLayer
    output_class = MoeModelOutputWithPast


class Qwen3MoeForCausalLM(BalancedCausalLMHead, Qwen3MoePreTrainedModel, GenerationMixin):
    backbone_class = Qwen3MoeModel


class Qwen3MoeForSequenceClassification(SequenceClassificationHead, Qwen3MoePreTrainedModel):
    backbone_class = Qwen3MoeModel


class Qwen3MoeForTokenClassification(TokenClassificationHead, Qwen3MoePreTrainedModel):
    backbone_class = Qwen3MoeModel


class Qwen3MoeForQuestionAnswering(QuestionAnsweringHead, Qwen3MoePreTrainedModel):
    base_model_prefix = "transformer"  # the name its checkpoints have on disk
    backbone_class = Qwen3MoeModel
