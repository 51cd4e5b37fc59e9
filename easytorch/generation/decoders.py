"""The model and its cache as the decode loop uses them: logits after the prompt, and after each further token."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from easytorch.cache.static import LEAST_CACHE, LINEAR, bucket, full_static_cache
from easytorch.cache_names import CACHE, cache_argument
from easytorch.generation.model_layers import layers_of
from easytorch.generation.sampling import Sampler
from easytorch.layers.config import scales_by_slot

# The least length of a padded prompt.
LEAST_PROMPT = 16


class CausalLM(Protocol):
    """The interface of a causal language model of easytorch or transformers, or PEFT's wrapper of one."""

    config: Any
    generation_config: Any
    dtype: torch.dtype
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def can_generate(self) -> bool: ...

    def get_input_embeddings(self) -> Any: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


def align_right(ids: torch.Tensor, mask: torch.Tensor, pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T), (B, T) boolean -> the same with each row's tokens at its end, in order, without empty columns."""
    order = torch.argsort(mask.to(torch.int8), dim=-1, stable=True)
    mask = mask.gather(1, order)
    ids = torch.where(mask, ids.gather(1, order), pad_token_id)
    first = int(mask.any(dim=0).to(torch.int8).argmax())
    return ids[:, first:].contiguous(), mask[:, first:].contiguous()


def unwrapped(model: Any) -> Any:
    """The model in PEFT's wrapper, which takes **kwargs."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def static_refusal(model: CausalLM) -> str | None:
    """Why a model cannot use a static cache; None where it can."""
    from easytorch.layers.masks import slots_refusal

    inner = unwrapped(model)
    layers = layers_of(inner)
    if "position_ids" not in inspect.signature(inner.forward).parameters and set(layers.masks_of) != {LINEAR}:
        return "its forward takes no position_ids"
    if unknown := [layer_type for layer_type, create in layers.masks_of.items() if create is None]:
        return f"it has {', '.join(unknown)} layers"
    return slots_refusal(layers.config)


def static_lengths(model: CausalLM, prompt: int, max_new_tokens: int) -> tuple[int, int]:
    """Of the padded prompt, and of the cache."""
    length = prompt if scales_by_slot(model.config) else bucket(prompt, LEAST_PROMPT)
    return length, bucket(length + max_new_tokens, LEAST_CACHE)


class Decoder(ABC):
    """One run of a model: `prompt()` once, then `step(tokens)` for each token. Both return logits (B, V).

    ids (B, T) and mask (B, T), as the decoder is given them, are on the host. greedy: they return the tokens of the
    largest logits, (B,) int64, in place of logits where the model can do without these.
    """

    def __init__(self, model: CausalLM, ids: torch.Tensor, mask: torch.Tensor, device: torch.device) -> None:
        self.model, self.ids, self.mask, self.device = model, ids, mask, device
        self.greedy = False

    @abstractmethod
    def prompt(self) -> torch.Tensor: ...

    @abstractmethod
    def step(self, tokens: torch.Tensor) -> torch.Tensor: ...

    def begin(self, sampler: Sampler) -> None:  # noqa: B027 - most have nothing to do
        """Called before the prompt."""

    def end(self) -> None:  # noqa: B027
        """Called after the last token of a run that was not interrupted by an error."""

    def next(self, tokens: torch.Tensor | None, sampler: Sampler) -> torch.Tensor:
        """The tokens (B,) after `tokens`, or after the prompt."""
        found = self.prompt() if tokens is None else self.step(tokens)
        return sampler(found) if found.dim() == 2 else sampler.follow(found)


class CausalDecoder(Decoder):
    """Of a model without an encoder."""

    def __init__(self, model: CausalLM, ids: torch.Tensor, mask: torch.Tensor, device: torch.device) -> None:
        super().__init__(model, ids, mask, device)
        inner = unwrapped(model)
        self._layers = layers_of(inner)
        self._accepted = inspect.signature(inner.forward).parameters
        self._cache_name = cache_argument(inner.forward)
        self._attends = set(self._layers.masks_of) != {LINEAR}

    def _positions(self) -> torch.Tensor:
        """(B, T): 0 at each row's first token; padding, which nothing sees, has 0 too."""
        return (self.mask.cumsum(dim=-1) - 1).clamp(min=0)

    def _call(self, ids: torch.Tensor, mask: Any, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        optional = {"position_ids": positions, "logits_to_keep": 1}
        optional = {name: value for name, value in optional.items() if name in self._accepted}
        optional[self._cache_name] = cache
        # of the class: a wrapper (PEFT) has the attributes of its model, and does more than call it
        likeliest = getattr(type(self.model), "likeliest_token", None)
        if self.greedy and likeliest is not None and ids.is_cpu:
            given = {name: value for name, value in optional.items() if name != "logits_to_keep"}
            tokens: torch.Tensor | None = likeliest(
                self.model, input_ids=ids, attention_mask=mask, use_cache=True, **given
            )
            if tokens is not None:
                return tokens
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **optional)
        logits: torch.Tensor = output.logits
        return logits[:, -1]


class DynamicDecoder(CausalDecoder):
    """A cache that grows by one token per step: no work on empty slots, and a new shape at each step."""

    def __init__(
        self, model: CausalLM, ids: torch.Tensor, mask: torch.Tensor, max_new_tokens: int, device: torch.device
    ) -> None:
        from transformers import DynamicCache

        super().__init__(model, ids, mask, device)
        self._cache = DynamicCache(config=self._layers.config)
        self._position = self._positions()[:, -1:].to(device)
        self._seen = mask.to(device=device, dtype=torch.int64)

    def prompt(self) -> torch.Tensor:
        return self._call(self.ids.to(self.device), self._seen, self._positions().to(self.device), self._cache)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self._position = self._position + 1
        self._seen = pad(self._seen, (0, 1), value=1)
        # a state has taken the padding in: transformers' Mamba would multiply one token by the whole mask
        mask = self._seen if self._attends else None
        return self._call(tokens[:, None], mask, self._position, self._cache)


class StaticDecoder(CausalDecoder):
    """A cache of fixed length, a prompt padded on the left to a power of two: every step has the same shapes.

    Every layer keeps the full length, sliding-window layers too (transformers rolls those with a Python counter, which
    would compile a new program per step); their window is in the mask. Masks are built here, because deciding whether
    one is needed would read the padding back to the host.
    """

    def __init__(
        self, model: CausalLM, ids: torch.Tensor, mask: torch.Tensor, max_new_tokens: int, device: torch.device
    ) -> None:
        length, capacity = static_lengths(model, ids.shape[1], max_new_tokens)
        left = (length - ids.shape[1], 0)
        super().__init__(model, pad(ids, left), pad(mask, left), device)
        if (reason := static_refusal(model)) is not None:
            raise ValueError(f"{type(model).__name__} cannot use a static cache: {reason}; use cache='dynamic'")
        self._cache = full_static_cache(self._layers.types, capacity)
        # slots after the prompt are marked visible: the causal mask hides those not yet written
        self._seen = pad(self.mask, (0, capacity - length), value=True).to(device)
        self._position = self._positions()[:, -1:].to(device)

    def prompt(self) -> torch.Tensor:
        ids, positions = self.ids.to(self.device), self._positions().to(self.device)
        return self._call(ids, self._masks(ids, positions), positions, self._cache)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self._position += 1
        ids = tokens[:, None]
        return self._call(ids, self._masks(ids, self._position), self._position, self._cache)

    def _masks(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """One mask, or a dict of masks by layer type for models that take one."""
        like = torch.empty((*ids.shape, 1), dtype=self.model.dtype, device=self.device)
        given = {"config": self._layers.config, "inputs_embeds": like, CACHE: self._cache}
        given |= {"position_ids": positions, "allow_is_causal_skip": False}
        # a layer with a state sees the padding of these tokens alone, and no slot of the cache
        seen = {LINEAR: self._seen[:, : ids.shape[1]].to(torch.int64)}
        masks = {
            layer_type: create(**given, attention_mask=seen.get(layer_type, self._seen))
            for layer_type, create in self._layers.masks_of.items()
            if create is not None
        }
        return masks if self._layers.by_type else next(iter(masks.values()))
