"""A model's forward up to its head: the hidden states and the head's weight in place of the logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from easytorch.layers.causal_loss import plain_parameters
from easytorch.layers.deferred_logits import DeferredLogits, deferring
from easytorch.layers.token_loss import HeadProduct, finished
from easytorch.layers.vocabulary_parallel import product as product_of
from easytorch.layers.vocabulary_parallel import sharded_parameters


def without_logits(model: PreTrainedModel, inputs: Mapping[str, Any]) -> tuple[Any, HeadProduct] | None:
    """(output, the product its logits are) of a call of `model`; the output computes its logits when they are read.

    The head computes a single position, which shows what the model does with its logits: a factor or a soft cap. None
    where the head is not a plain linear layer of (B, T, D), or the model does something else with the logits; the
    forward is then wasted.
    """
    head: Any = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        return None
    weight, bias = plain_parameters(head)
    if weight is None:  # nor FSDP's, which would be gone when the output's logits are read
        weight, bias = sharded_parameters(head)
    if weight is None or weight.device.type == "xla":  # where the probe, which is read, would end the program
        return None
    before: Any = head.__dict__.get("forward")  # tensor parallelism's
    seen: list[Tensor] = []
    probed: list[Tensor] = []

    def of_one_position(hidden_states: Tensor) -> Tensor:
        seen.append(hidden_states)
        with torch.no_grad():
            if hidden_states.dim() != 3 or 0 in hidden_states.shape:
                return product_of(hidden_states, weight, bias)
            # the largest states: a soft cap shows best in large logits
            position = int(hidden_states.norm(dim=-1).amax(0).argmax())
            probed.append(product_of(hidden_states[:, position : position + 1], weight, bias))
        return probed[-1].clone()

    head.forward = of_one_position
    try:
        output = model(**inputs)
    finally:
        del head.__dict__["forward"]
        if before is not None:
            head.forward = before
    logits = getattr(output, "logits", None)
    if len(seen) != 1 or len(probed) != 1 or not isinstance(logits, Tensor) or logits.shape != probed[0].shape:
        return None
    for factor, softcap in _finishes(model):
        if _equal(logits, finished(probed[0], factor, softcap)):
            product = HeadProduct(seen[0], weight, bias, factor, softcap)
            fields = dict(output.items()) | {"logits": DeferredLogits(product.materialize)}
            output_class: type[ModelOutput] = type(output)
            return deferring(output_class)(**fields), product
    return None


def _finishes(model: PreTrainedModel) -> Iterator[tuple[float, float | None]]:
    """Candidates for how the model finishes its logits, as (factor, softcap): its own `logits_finish`, what the keys of
    its config suggest, and (1, None)."""
    known: Any = getattr(model, "logits_finish", None)
    if known is not None:
        yield known()
    config = model.config.get_text_config(decoder=True)
    cap, scale, divisor = (
        getattr(config, name, None) for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
    )
    if cap:
        yield 1.0, float(cap)
    if isinstance(scale, float | int) and scale:
        yield float(scale), None
    if divisor:
        yield 1.0 / float(divisor), None
    yield 1.0, None


def _equal(logits: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding in the logits' dtype."""
    tolerance = 8 * torch.finfo(logits.dtype).eps * float(expected.abs().max())
    return bool((logits - expected).abs().max() <= tolerance)
