"""`generate_batch` with our attention, which transformers' continuous batching accepts under the name "sdpa"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from easytorch.layers.attention import OF_STOCK, OURS, SAID_TO_BATCHING

_AS = {stock["easytorch"]: name for name, stock in OF_STOCK.items()}


def generate_batch(model: PreTrainedModel, generate: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `generate`, transformers' `generate_batch`, on `model`; `RuntimeError` where a request fails.

    By itself it logs errors of its thread and returns fewer results, or none.
    """
    with _known_attention(model):
        results = generate(inputs, *args, **kwargs)
    failed = {name: result.error for name, result in results.items() if result.error is not None}
    if failed or len(results) < len(inputs):
        reasons = "; ".join(f"{name}: {error}" for name, error in failed.items()) or "see the log above for the reason"
        raise RuntimeError(
            f"generate_batch finished {len(results) - len(failed)} of {len(inputs)} requests of "
            f"{type(model).__name__} with attn_implementation={model.config._attn_implementation!r}: {reasons}"
        )
    return results


@contextmanager
def _known_attention(model: torch.nn.Module) -> Iterator[None]:
    """The configs have the names of transformers' own attention, and what they call stays ours."""
    configs = {id(config): config for module in model.modules() if (config := _ours(module)) is not None}
    names = {key: config._attn_implementation for key, config in configs.items()}
    automatic = {key for key, name in names.items() if name == "easytorch"} - SAID_TO_BATCHING
    SAID_TO_BATCHING.update(automatic)
    for config in configs.values():
        config._attn_implementation_internal = _AS[config._attn_implementation]
    try:
        yield
    finally:
        SAID_TO_BATCHING.difference_update(automatic)
        for key, config in configs.items():
            config._attn_implementation_internal = names[key]


def _ours(module: torch.nn.Module) -> PreTrainedConfig | None:
    """The module's config if it names an attention of ours."""
    config = getattr(module, "config", None)
    if not isinstance(config, PreTrainedConfig) or config._attn_implementation not in OURS:
        return None
    if config._attn_implementation not in _AS:
        raise ValueError(
            f"generate_batch runs with attn_implementation='easytorch', 'sdpa' or 'eager', this model has "
            f"{config._attn_implementation!r}; change it with model.set_attn_implementation('easytorch')"
        )
    return config
