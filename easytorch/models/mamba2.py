"""Mamba 2 (arXiv:2405.21060): Mamba's decoder with heads that share a scalar decay, and a gated norm in each mixer."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin, Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2CausalLMOutput, Mamba2Output

from easytorch.cache_names import STATES
from easytorch.layers import mamba2_mixer
from easytorch.layers.stock_names import given_by
from easytorch.models.mamba import MambaBlock, MambaForCausalLM, MambaModel, MambaPreTrainedModel


class Mamba2Mixer(mamba2_mixer.Mamba2Mixer):
    chunk_size = given_by("config.chunk_size")
    time_step_rank = given_by("config.time_step_rank")
    time_step_min = given_by("config.time_step_min")
    time_step_max = given_by("config.time_step_max")
    time_step_floor = given_by("config.time_step_floor")
    entries = ("num_heads", "n_groups")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(
            layer_idx,
            hidden_size=config.hidden_size,
            heads=config.num_heads,
            head_dim=config.head_dim,
            groups=config.n_groups,
            state_size=config.state_size,
            conv_kernel=config.conv_kernel,
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            act=config.hidden_act,
            eps=config.layer_norm_epsilon,
            time_step_limit=config.time_step_limit,
        )


class Mamba2Block(MambaBlock):
    mixer_class = Mamba2Mixer


class Mamba2PreTrainedModel(MambaPreTrainedModel):
    config: Mamba2Config
    config_class = Mamba2Config
    _no_split_modules = ["Mamba2Block"]  # noqa: RUF012
    mixer_class = Mamba2Mixer


class Mamba2Model(Mamba2PreTrainedModel, MambaModel):
    block_class = Mamba2Block
    output_class = Mamba2Output


class Mamba2ForCausalLM(Mamba2PreTrainedModel, MambaForCausalLM, GenerationMixin):
    backbone_class = Mamba2Model
    output_class = Mamba2CausalLMOutput
    arguments = (
        "input_ids", "inputs_embeds", STATES, "labels", "output_hidden_states", "return_dict", "use_cache",
        "attention_mask", "logits_to_keep", "seq_idx",
    )  # fmt: skip
