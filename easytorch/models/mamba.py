"""Mamba (arXiv:2312.00752): layers of a convolution and a selective scan, without attention."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache, DynamicCache, GenerationMixin, MambaConfig, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.mamba.modeling_mamba import MambaCausalLMOutput, MambaOutput
from transformers.utils.generic import can_return_tuple

from easytorch.cache_names import STATES, cache_of, state_keyword, takes_states
from easytorch.layers.arguments import ArgumentsInOrder
from easytorch.layers.basics import check_one_input, keep_logits
from easytorch.layers.deferred_logits import DeferredLogits, deferring
from easytorch.layers.heads import FusedLoss
from easytorch.layers.linear import linear
from easytorch.layers.mamba_mixer import MambaMixer
from easytorch.layers.norm import RMSNorm
from easytorch.layers.recurrent import padding_mask
from easytorch.layers.stock_names import given_by
from easytorch.protocol.native import NativeDecoder


class MambaBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), the sum in float32 where `config.residual_in_fp32`: (B, T, D) -> (B, T, D)."""

    layer_idx = given_by("mixer.layer_idx")
    mixer_class: ClassVar[type[nn.Module]] = MambaMixer

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mixer = self.mixer_class(config, layer_idx)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        mixed = self.mixer(self.norm(hidden_states.to(self.norm.weight.dtype)), **kwargs)
        return (hidden_states.float() if self.residual_in_fp32 else hidden_states) + mixed


class MambaPreTrainedModel(NativeDecoder):
    config: MambaConfig
    config_class = MambaConfig
    base_model_prefix = "backbone"
    _input_embed_layer = "embeddings"
    _no_split_modules = ["MambaBlock", "MambaMixer"]  # noqa: RUF012
    _skip_keys_device_placement = [STATES]  # noqa: RUF012
    _is_stateful = True
    mixer_class: ClassVar[type[nn.Module]] = MambaMixer

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if not isinstance(module, self.mixer_class):
            return
        mixer: Any = module  # nn.Module's attributes are `Tensor | Module`
        mixer.reset_parameters(self.config)
        initialization.kaiming_uniform_(mixer.conv1d.weight, a=math.sqrt(5))
        weight = mixer.out_proj.weight
        initialization.kaiming_uniform_(weight, a=math.sqrt(5))
        if self.config.rescale_prenorm_residual and not getattr(weight, "_is_hf_initialized", False):
            with torch.no_grad():  # GPT-2's scheme: the residuals add up over the layers
                weight /= math.sqrt(self.config.num_hidden_layers)


class MambaModel(ArgumentsInOrder, MambaPreTrainedModel):
    block_class: ClassVar[type[MambaBlock]] = MambaBlock
    output_class: ClassVar[Any] = MambaOutput
    arguments = (
        "input_ids", "inputs_embeds", STATES, "use_cache", "output_hidden_states", "return_dict", "attention_mask"
    )  # fmt: skip

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.block_class(config, index) for index in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self._register_load_state_dict_pre_hook(_rename_embeddings)
        self.post_init()

    @takes_states
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MambaOutput:
        """input_ids (B, T) or inputs_embeds (B, T, D) -> last_hidden_state (B, T, D), and the cache when `use_cache`.

        attention_mask (B, past + T): 1 for tokens and 0 for padding. seq_idx (B, T): packed sequences, by number.
        """
        check_one_input(input_ids, inputs_embeds)
        hidden_states = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and self.gradient_checkpointing and self.training:
            use_cache = False
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        mask = padding_mask(attention_mask, hidden_states.shape[1])
        after = []
        for layer in self.layers:
            hidden_states = layer(hidden_states, **state_keyword(cache), attention_mask=mask, **kwargs)
            after.append(hidden_states)
        hidden_states = self.norm_f(hidden_states)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        output: MambaOutput = self.output_class(
            last_hidden_state=hidden_states,
            **state_keyword(cache if use_cache else None),
            hidden_states=(*after, hidden_states) if output_hidden_states else None,
        )
        return output


class MambaForCausalLM(ArgumentsInOrder, FusedLoss, MambaPreTrainedModel, GenerationMixin):
    backbone_class: ClassVar[type[MambaModel]] = MambaModel
    output_class: ClassVar[Any] = MambaCausalLMOutput
    arguments: ClassVar[tuple[str, ...]] = (
        "input_ids", "attention_mask", "inputs_embeds", STATES, "labels", "output_hidden_states", "return_dict",
        "use_cache", "logits_to_keep", "seq_idx",
    )  # fmt: skip
    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.backbone = self.backbone_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def prepare_inputs_for_generation(
        self, input_ids: Any, *args: Any, inputs_embeds: Any = None, **kwargs: Any
    ) -> Any:
        """Drops the mask after the prompt: the state has left its padding out. inputs_embeds: `generate` looks whether
        this has it."""
        prepare: Any = super().prepare_inputs_for_generation
        inputs = prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if kwargs.get("use_cache") and not kwargs.get("is_first_iteration"):
            inputs["attention_mask"] = None
        return inputs

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.float()

    def logits_finish(self) -> tuple[float, float | None]:
        return 1.0, None

    @takes_states
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        cache: Cache | None = None,
        labels: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        seq_idx: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MambaCausalLMOutput:
        """As the backbone's, and logits (B, T, vocabulary), float32, of the positions `logits_to_keep` names.

        labels (B, T): the tokens themselves, -100 where no loss is taken; the shift by one is done here. In training
        the loss of a large vocabulary is computed without the logits, which are computed if they are read.
        """
        outputs = self.backbone(
            input_ids,
            **state_keyword(cache),
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            use_cache=use_cache,
            attention_mask=attention_mask,
            seq_idx=seq_idx,
            return_dict=True,
        )
        kept = keep_logits(outputs.last_hidden_state, logits_to_keep).to(self.lm_head.weight.dtype)
        loss, output_class = None, self.output_class
        logits: Any = None
        if labels is not None and isinstance(logits_to_keep, int) and not logits_to_keep:
            loss = self.fused_loss(kept, labels, **kwargs)
        if loss is not None:
            deferred = DeferredLogits(lambda: self.finish_logits(linear(self.lm_head, kept)))
            logits, output_class = deferred, deferring(output_class)
        else:
            logits = self.finish_logits(linear(self.lm_head, kept))
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output: MambaCausalLMOutput = output_class(
            loss=loss, logits=logits, **state_keyword(cache_of(outputs)), hidden_states=outputs.hidden_states
        )
        return output


def _rename_embeddings(state_dict: dict[str, Any], *_: Any) -> None:
    """Takes the embeddings' name in the authors' checkpoints."""
    for name in [name for name in state_dict if "embedding." in name]:
        state_dict[name.replace("embedding.", "embeddings.")] = state_dict.pop(name)
