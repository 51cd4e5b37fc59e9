"""Llama 4's text model: chunks of attention, layers without positions, experts that are given scaled inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin, Llama4TextConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.cache_names import cache_keyword, takes_cache
from easytorch.layers.basics import plain_activation
from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.experts import Experts
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.masks import Masks, types_of_config
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.moe_heads import MoeCausalLMHead
from easytorch.layers.norm import PlainRMSNorm
from easytorch.layers.rotary import Float32RotaryEmbedding
from easytorch.layers.routers import Router
from easytorch.layers.sparse_moe import SparseMoe
from easytorch.layers.stock_names import given_by
from easytorch.protocol.native import NativeMoeDecoder


class Llama4TextMLP(GatedMLP):
    act_name = "activation_fn"

    def __init__(self, config: Any, intermediate_size: int) -> None:
        super().__init__(config.hidden_size, intermediate_size, plain_activation(config.hidden_act))


class Llama4TextAttention(GroupedAttention):
    """Layers with positions normalise what was rotated; those without scale queries by where they stand."""

    attn_temperature_tuning = given_by("config.attn_temperature_tuning")
    interleaved = True
    types_of_layers = staticmethod(types_of_config)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.use_rope = bool(config.no_rope_layers[layer_idx])  # 1 where a layer has rotary positions
        self.tempered = config.attn_temperature_tuning and not self.use_rope
        self.floor_scale, self.attn_scale = config.floor_scale, config.attn_scale
        if config.use_qk_norm and self.use_rope:
            self.qk_norm = PlainRMSNorm(config.rms_norm_eps)

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings: Any, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids (1, T): places in the cache, padding included (arXiv:2501.19399)."""
        query, key = super().rotate(query, key, position_embeddings, position_ids)
        if "qk_norm" in self._modules:
            query, key = self.qk_norm(query), self.qk_norm(key)
        if self.tempered:
            assert position_ids is not None, "the model passes them"
            steps = torch.floor((position_ids.float() + 1.0) / self.floor_scale)
            scale = torch.log1p(steps) * self.attn_scale + 1.0
            query = (query * scale[:, :, None, None]).to(query.dtype)
        return query, key


class Llama4TextExperts(Experts):
    hidden_size = given_by("config.hidden_size")
    intermediate_size = given_by("config.intermediate_size")
    expert_dim = given_by("config.intermediate_size")
    is_transposed = True
    scales_inputs = True

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.num_local_experts, config.intermediate_size)


class Llama4Router(Router):
    """The sigmoid of the k largest logits, in float32 and rounded to their dtype."""

    in_features = given_by("hidden_dim")
    out_features = given_by("num_experts")

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.num_local_experts)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = logits.topk(self.top_k, dim=-1)
        return values.float().sigmoid().to(logits.dtype), indices


class Llama4TextMoe(SparseMoe):
    top_k = given_by("router.top_k")
    num_experts = given_by("router.num_experts")
    hidden_dim = given_by("router.hidden_dim")
    order = ("experts", "router")
    router_class = Llama4Router
    experts_class = Llama4TextExperts

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.shared_expert = Llama4TextMLP(config, config.intermediate_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.shared_expert(hidden_states) + super().forward(hidden_states)


class Llama4TextDecoderLayer(DecoderLayer):
    """With experts in the layers that `moe_layers` names."""

    layer_idx = given_by("self_attn.layer_idx")
    attention_class = Llama4TextAttention
    mlp_name = "feed_forward"

    @property
    def is_moe_layer(self) -> bool:
        return isinstance(self.feed_forward, Llama4TextMoe)

    def new_mlp(self, config: Any, layer_idx: int) -> nn.Module:
        if layer_idx in config.moe_layers:
            return Llama4TextMoe(config)
        return Llama4TextMLP(config, config.intermediate_size_mlp)


class Llama4PreTrainedModel(NativeMoeDecoder):
    config: Llama4TextConfig
    config_class = Llama4TextConfig
    other_experts = False
    least_counts = {"intermediate_size_mlp": 0, "floor_scale": 1}  # noqa: RUF012
    _no_split_modules = ["Llama4TextDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "attentions": Llama4TextAttention,
        "hidden_states": Llama4TextDecoderLayer,
        "router_logits": OutputRecorder(Llama4Router, index=0),
    }


class Llama4TextModel(DecoderBackbone, Llama4PreTrainedModel):
    # transformers' experts take tokens that are scaled already, and so have no plan
    _ep_plan = {  # noqa: RUF012
        "layers.*.feed_forward.experts.gate_up_proj": "grouped_gemm",
        "layers.*.feed_forward.experts.down_proj": "grouped_gemm",
        "layers.*.feed_forward.experts": "ep_dispatch_experts",
    }
    layer_class = Llama4TextDecoderLayer
    rotary_class = Float32RotaryEmbedding
    output_class = MoeModelOutputWithPast

    def __init__(self, config: Any) -> None:
        if len(config.no_rope_layers) < config.num_hidden_layers:
            raise ValueError(
                f"llama4_text: config.no_rope_layers has {len(config.no_rope_layers)} entries for "
                f"num_hidden_layers={config.num_hidden_layers}"
            )
        super().__init__(config)

    @takes_cache
    def run_layers(
        self,
        hidden_states: torch.Tensor,
        masks: Masks,
        positions: Mapping[str, Any],
        *,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The layers are given places in the cache for position_ids, which padding and packing do not move."""
        places = self.default_positions(hidden_states, None, cache)
        return super().run_layers(
            hidden_states, masks, positions, position_ids=places, **cache_keyword(cache), **kwargs
        )


class Llama4ForCausalLM(MoeCausalLMHead, Llama4PreTrainedModel, GenerationMixin):
    base_model_prefix = "language_model"  # where checkpoints with images have it
    backbone_name = "model"
    backbone_class = Llama4TextModel
    _pp_plan = None

    @property
    def base_model(self) -> Any:
        """The decoder."""
        return self.model
