"""The language modeling head of families with experts: it returns what their routers computed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from easytorch.cache_names import takes_cache
from easytorch.layers import sequence_parallel
from easytorch.layers.deferred_logits import DeferredLogits
from easytorch.layers.heads import CausalLMHead, text_config_of
from easytorch.layers.routers import load_balancing_loss


class MoeCausalLMHead(CausalLMHead):
    """`CausalLMHead` whose output has `router_logits` if `output_router_logits` is set."""

    output_class = MoeCausalLMOutputWithPast


class BalancedCausalLMHead(MoeCausalLMHead):
    """`MoeCausalLMHead` that adds `config.router_aux_loss_coef` times the routers' load balancing loss to the loss."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        text = text_config_of(config)
        local = getattr(text, "num_local_experts", None)  # 0 of a Granite without experts
        self.num_experts: int = text.num_experts if local is None else local
        self.router_aux_loss_coef = text.router_aux_loss_coef
        self.num_experts_per_tok = text.num_experts_per_tok

    def make_output(
        self,
        outputs: Any,
        loss: torch.Tensor | None,
        logits: torch.Tensor | DeferredLogits,
        attention_mask: Any,
        **fields: Any,
    ) -> Any:
        if outputs.router_logits:
            shard = sequence_parallel.shard_of(self)
            padding = attention_mask if getattr(attention_mask, "ndim", None) == 2 else None
            if shard is None:
                aux_loss = load_balancing_loss(outputs.router_logits, self.num_experts_per_tok, padding)
            else:
                aux_loss = load_balancing_loss(
                    outputs.router_logits, self.num_experts_per_tok, shard.padding, shard.over_ranks
                )
            fields["aux_loss"] = aux_loss  # given to the constructor, which puts fields in the order of the class
            if loss is not None:
                # the losses of ranks that divide a sequence are summed, and this one is the same on each
                part = aux_loss if shard is None else aux_loss / shard.ranks
                loss = loss + self.router_aux_loss_coef * part.to(loss.device)
        return super().make_output(outputs, loss, logits, attention_mask, **fields)

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """`CausalLMHead.forward`; output_router_logits: those of each layer, and their load balancing loss."""
        if output_router_logits is None:
            output_router_logits = text_config_of(self.config).output_router_logits
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            output_router_logits=output_router_logits,
            **kwargs,
        )
