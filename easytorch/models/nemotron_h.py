"""Nemotron-H (arXiv:2504.03624): layers of one mixer each, Mamba 2, attention without positions, an MLP or experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, NemotronHConfig, initialization
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.cache_names import CACHE, cache_keyword, state_keyword, takes_cache
from easytorch.layers import mamba2_mixer
from easytorch.layers.arguments import ArgumentsInOrder
from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.experts import Experts
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.kept_in_float32 import kept_in_float32
from easytorch.layers.linear import linear
from easytorch.layers.masks import FULL, LINEAR, MASKS_OF, Masks, types_of_config
from easytorch.layers.mlp import PlainMLP
from easytorch.layers.moe_heads import MoeCausalLMHead
from easytorch.layers.recurrent import recurrent_mask
from easytorch.layers.routers import GroupedSigmoidRouter
from easytorch.layers.sparse_moe import SparseMoe
from easytorch.layers.stock_names import given_by
from easytorch.protocol.native import NativeMoeDecoder


class NemotronHAttention(GroupedAttention):
    types_of_layers = staticmethod(types_of_config)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=False)


class NemotronHMamba2Mixer(mamba2_mixer.Mamba2Mixer):
    chunk_size = given_by("config.chunk_size")
    use_mem_eff_path = True
    entries = ("mamba_num_heads", "n_groups")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(
            layer_idx,
            hidden_size=config.hidden_size,
            heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
            groups=config.n_groups,
            state_size=config.ssm_state_size,
            conv_kernel=config.conv_kernel,
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            act=config.mamba_hidden_act,
            eps=config.layer_norm_epsilon,
            time_step_limit=(config.time_step_min, math.inf),
        )


class NemotronHMLP(PlainMLP):
    def __init__(self, config: Any, layer_idx: int | None = None, *, intermediate_size: int | None = None) -> None:
        width = intermediate_size or config.intermediate_size
        super().__init__(config.hidden_size, width, config.mlp_hidden_act, bias=config.mlp_bias)


class NemotronHExperts(Experts):
    has_gate = False

    def __init__(self, config: Any) -> None:
        width, hidden = config.moe_intermediate_size, config.moe_latent_size
        super().__init__(config, config.n_routed_experts, width, hidden_size=hidden, act=config.mlp_hidden_act)


class NemotronHTopkRouter(GroupedSigmoidRouter):
    def __init__(self, config: Any) -> None:
        super().__init__(config, config.n_routed_experts)


class NemotronHMoE(SparseMoe):
    """Experts, of a latent width if `config.moe_latent_size` is set, and a shared expert."""

    order = ("experts", "gate")
    router_class = NemotronHTopkRouter
    experts_class = NemotronHExperts

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config)
        shared = config.moe_shared_expert_intermediate_size
        self.shared_experts = NemotronHMLP(config, intermediate_size=shared)
        hidden, latent = config.hidden_size, config.moe_latent_size
        if latent is not None:
            self.fc1_latent_proj = nn.Linear(hidden, latent, bias=config.mlp_bias)
            self.fc2_latent_proj = nn.Linear(latent, hidden, bias=config.mlp_bias)
        self.narrows = latent is not None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, indices = self.route(rows)
        if self.narrows:
            rows = self.experts(linear(self.fc1_latent_proj, rows), indices, weights)
            rows = linear(self.fc2_latent_proj, rows)
        else:
            rows = self.experts(rows, indices, weights)
        return rows.view_as(hidden_states) + self.shared_experts(hidden_states)


class NemotronHBlock(DecoderLayer):
    """x + mixer(norm(x)): (B, T, D) -> (B, T, D)."""

    block_type = given_by("layer_type")
    attention_class = NemotronHAttention
    norm_eps = "layer_norm_epsilon"
    mixers: ClassVar[Mapping[str, type[nn.Module]]] = {
        LINEAR: NemotronHMamba2Mixer,
        "moe": NemotronHMoE,
        "mlp": NemotronHMLP,
    }

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.norm = self.new_norm(config)
        self.layer_idx, self.layer_type = layer_idx, config.layer_types[layer_idx]
        mixer = self.attention_class if self.layer_type == FULL else self.mixers[self.layer_type]
        self.mixer = mixer(config, layer_idx)

    @takes_cache
    def forward(self, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> torch.Tensor:
        normalized = self.norm(hidden_states.to(self.norm.weight.dtype))  # type: ignore[arg-type]
        if self.layer_type == LINEAR:
            mixed = self.mixer(normalized, **state_keyword(cache), **kwargs)
        elif self.layer_type == FULL:
            mixed, _ = self.mixer(hidden_states=normalized, **cache_keyword(cache), **kwargs)
        else:
            mixed = self.mixer(normalized)
        return hidden_states + mixed


def _no_mask(**_: Any) -> None:
    """None, the mask of layers without attention."""


class NemotronHPreTrainedModel(NativeMoeDecoder):
    config: NemotronHConfig
    config_class = NemotronHConfig
    _input_embed_layer = "embeddings"
    _no_split_modules = ["NemotronHBlock"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": NemotronHBlock,
        "attentions": NemotronHAttention,
        "router_logits": OutputRecorder(NemotronHTopkRouter, index=0),
    }
    _is_stateful = True
    _keep_in_fp32_modules_strict = kept_in_float32("NemotronHPreTrainedModel")
    _keys_to_ignore_on_load_unexpected = [r"mtp.*"]  # noqa: RUF012 - layers of multi-token prediction

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if not isinstance(module, NemotronHMamba2Mixer):
            return
        module.reset_parameters(self.config)
        weight = module.out_proj.weight
        if self.config.rescale_prenorm_residual and not getattr(weight, "_is_hf_initialized", False):
            initialization.kaiming_uniform_(weight, a=math.sqrt(5))
            with torch.no_grad():  # GPT-2's scheme: the residuals add up over the layers
                weight /= math.sqrt(self.config.num_hidden_layers)


class NemotronHModel(DecoderBackbone, ArgumentsInOrder, NemotronHPreTrainedModel):
    arguments = ("input_ids", "inputs_embeds", "position_ids", CACHE, "use_cache", "attention_mask")
    layer_class = NemotronHBlock
    rotary_class = None
    norm_name = "norm_f"
    output_class = MoeModelOutputWithPast
    masks_of: ClassVar[Mapping[str, Callable[..., Any]]] = {
        FULL: MASKS_OF[FULL],
        LINEAR: recurrent_mask,
        "moe": _no_mask,
        "mlp": _no_mask,
    }

    @staticmethod
    def embedding(config: Any) -> nn.Embedding:
        return nn.Embedding(config.vocab_size, config.hidden_size)

    def make_masks(self, inputs_embeds: torch.Tensor, attention_mask: Any, *rest: Any) -> Masks:
        if isinstance(attention_mask, Mapping):  # ready made, for the layers that look at other tokens
            attention_mask = {**attention_mask, "moe": None, "mlp": None}
        return super().make_masks(inputs_embeds, attention_mask, *rest)


class NemotronHForCausalLM(MoeCausalLMHead, NemotronHPreTrainedModel, GenerationMixin):
    backbone_class = NemotronHModel
    _tied_weights_keys = {}  # noqa: RUF012 - as in transformers
    _tp_plan = _pp_plan = _fsdp_plan = None  # transformers has none

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.float()

    def logits_finish(self) -> tuple[float, float | None]:
        return 1.0, None

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        kwargs["logits_to_keep"] = self.config.num_logits_to_keep
        prepare: Any = super().prepare_inputs_for_generation
        return prepare(input_ids, **kwargs)

    @staticmethod
    @takes_cache
    def create_masks_for_generate(
        config: Any,
        inputs_embeds: torch.Tensor,
        attention_mask: Any,
        cache: Any,
        position_ids: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        """The masks of a static cache, by layer type: transformers' own table lacks two of them."""
        given = {"config": config.get_text_config(), "inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
        given |= {CACHE: cache, "position_ids": position_ids}
        return {layer_type: mask(**given) for layer_type, mask in NemotronHModel.masks_of.items()}
