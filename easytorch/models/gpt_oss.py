"""gpt-oss (arXiv:2508.10925): attention with sinks, and experts with biases and a gate that is clamped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, GptOssConfig, PreTrainedConfig, initialization
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.basics import plain_activation
from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.experts import Experts
from easytorch.layers.experts_step import Unit, clamped_unit
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.masks import types_of_config
from easytorch.layers.moe_heads import BalancedCausalLMHead
from easytorch.layers.norm import Float32RMSNorm
from easytorch.layers.routers import TopKSoftmaxRouter
from easytorch.layers.sparse_moe import SparseMoe
from easytorch.layers.stock_names import given_by
from easytorch.protocol.native import NativeMoeDecoder
from easytorch.protocol.packed_loading import packed_checkpoint


class GptOssAttention(GroupedAttention):
    """A learned logit for each head joins the softmax and has no value: the sink."""

    types_of_layers = staticmethod(types_of_config)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sinks = nn.Parameter(torch.empty(config.num_attention_heads))

    def features(self) -> Mapping[str, Any]:
        return {**super().features(), "s_aux": self.sinks}


class GptOssExperts(Experts):
    """(up + 1) * gate * sigmoid(alpha * gate), both clamped; gate and up are the even and the odd columns."""

    hidden_size = given_by("config.hidden_size")
    intermediate_size = given_by("config.intermediate_size")
    has_bias = True
    is_transposed = True
    is_concatenated = False

    def __init__(self, config: PreTrainedConfig) -> None:
        act = plain_activation(config.hidden_act)  # which gpt-oss names and does not compute
        super().__init__(config, config.num_local_experts, config.intermediate_size, act=act)
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    def step_unit(self) -> Unit | None:
        plain = type(self)._apply_gate is GptOssExperts._apply_gate
        return clamped_unit(self.alpha, self.limit) if plain else None


class GptOssTopKRouter(TopKSoftmaxRouter):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_local_experts, bias=True)


class GptOssMLP(SparseMoe):
    order = ("router", "experts")
    router_class = GptOssTopKRouter
    experts_class = GptOssExperts


class GptOssDecoderLayer(DecoderLayer):
    attention_class = GptOssAttention
    mlp_class = GptOssMLP
    norm_class = Float32RMSNorm


class GptOssPreTrainedModel(NativeMoeDecoder):
    config: GptOssConfig
    config_class = GptOssConfig
    _supports_sdpa = False  # which has no sinks
    _no_split_modules = ["GptOssDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(GptOssTopKRouter, index=0),
        "hidden_states": GptOssDecoderLayer,
        "attentions": GptOssAttention,
    }
    _keep_in_fp32_modules = ["post_attention_layernorm", "input_layernorm", "norm"]  # noqa: RUF012

    @classmethod
    def refusal(cls, config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> str | None:
        quantization = kwargs.get("quantization_config") or getattr(config, "quantization_config", None) or {}
        options = quantization if isinstance(quantization, Mapping) else vars(quantization)
        if options.get("quant_method") != "mxfp4" or options.get("dequantize"):
            return None
        if packed_checkpoint(config.name_or_path or None, kwargs) is not None:
            return None
        return "its experts are not read in 4 bits here (Mxfp4Config(dequantize=True) loads the native class)"

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GptOssAttention):
            initialization.normal_(module.sinks, mean=0.0, std=self.config.initializer_range)


class GptOssModel(DecoderBackbone, GptOssPreTrainedModel):
    layer_class = GptOssDecoderLayer
    output_class = MoeModelOutputWithPast


class GptOssForCausalLM(BalancedCausalLMHead, GptOssPreTrainedModel, GenerationMixin):
    backbone_class = GptOssModel


class GptOssForSequenceClassification(SequenceClassificationHead, GptOssPreTrainedModel):
    backbone_class = GptOssModel


class GptOssForTokenClassification(TokenClassificationHead, GptOssPreTrainedModel):
    backbone_class = GptOssModel
