"""The calls of a small model in a trial: without mask, with masks of every kind, gradients, decoding with a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from easytorch.auto.inputs import Inputs
from easytorch.cache_names import CACHE, NAMES, cache_of
from easytorch.layers.attention import EAGER_INTERFACES


def cases(model: PreTrainedModel, inputs: Inputs) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, call): no mask, padding on either side, 4D masks of both kinds, gradients, more tokens after a cache."""
    yield "no mask", functools.partial(model, **inputs)
    yield "gradients", functools.partial(gradients, model, inputs)
    tokens = inputs.get("input_ids")
    if tokens is None:
        return
    batch, length = tokens.shape[:2]
    right = torch.ones(batch, length, dtype=torch.long)
    right[0, length - 3 :] = 0
    padded = {"padding on the right": right, "padding on the left": right.flip(1)}
    for name, mask in padded.items():
        yield name, functools.partial(model, **inputs, attention_mask=mask)
    yield "gradients with padding", functools.partial(gradients, model, inputs | {"attention_mask": right.flip(1)})
    seen = (torch.ones(length, length).tril() * right[:, None, None]).bool()
    seen[1, :, 2] = False  # the third row of the second sequence sees nothing
    seen[1, :, 2, :] = False
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    if model.config._attn_implementation not in (
        "eager",
        *EAGER_INTERFACES,
    ):  # which would add it to the scores as zeros and ones
        yield "a 4D boolean mask", functools.partial(model, **inputs, attention_mask=seen)
    yield "a 4D additive mask", functools.partial(model, **inputs, attention_mask=added)
    if "decoder_input_ids" in inputs:
        yield "padded decoder", functools.partial(model, **inputs, attention_mask=right, decoder_attention_mask=right)
    for name, mask in padded.items():
        yield f"decoding after {name}", functools.partial(_decode, model, inputs, mask, static=False)
    yield "decoding in a static cache", functools.partial(_decode, model, inputs, right.flip(1), static=True)


def gradients(model: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Module -> the gradients of its own weights, as one vector.

    A bias stands beside its weight: its gradient is the sum of what makes that of the weight. Where the sum cancels, as
    that of a key's does (no softmax sees a shift of all its keys), nothing but the rounding of its terms is left.
    """
    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        outputs = [tensor for tensor in tensors(model(**inputs)) if tensor.requires_grad]
        generator = torch.Generator().manual_seed(1)
        loss = sum((tensor * torch.randn(tensor.shape, generator=generator)).sum() for tensor in outputs)
        if not isinstance(loss, torch.Tensor):
            raise ValueError("no output has a gradient")
        loss.backward()
    found: dict[str, list[torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            found.setdefault(name.rpartition(".")[0], []).append(weight.grad.flatten())
    model.zero_grad(set_to_none=True)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _decode(model: Any, inputs: Inputs, mask: torch.Tensor, *, static: bool) -> list[Any]:
    """The outputs of all tokens but two, then one, then one, through a cache."""
    key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    tokens, length = inputs[key], inputs[key].shape[1]
    if static:
        config = model.config.get_text_config(decoder=True)
        cache: Any = StaticCache(config=config, max_cache_len=length + 3)
        if key == "decoder_input_ids":
            cache = EncoderDecoderCache(cache, DynamicCache(config=config))
    else:
        cache = None
    outputs = []
    for start, end in ((0, length - 2), (length - 2, length - 1), (length - 1, length)):
        step = inputs | {key: tokens[:, start:end], "use_cache": True, CACHE: cache}
        step["attention_mask"] = mask if key == "decoder_input_ids" else mask[:, :end]
        output = model(**step)
        outputs.append(output)
        cache = cache_of(output)
        if cache is None:
            raise ValueError("there is no cache")
    return outputs


def tensors(output: Any) -> list[torch.Tensor]:
    """The floating tensors of a model's output, without those of its caches."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = [value for name, value in output.items() if not any(one in name for one in NAMES)]
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in tensors(item)]
    return []
