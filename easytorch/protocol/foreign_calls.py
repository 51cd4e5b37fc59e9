"""Arguments that a class of transformers' own would take and compute wrongly with, refused before its forward."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from easytorch.protocol.cache_checks import check_own_cache


def watch_calls(model: PreTrainedModel) -> None:
    """Makes a class of transformers' own refuse `adapter_names` and a cache of ours for another model."""
    if not hasattr(type(model), "apply_lora_to_layers") and _check_call not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_check_call, with_kwargs=True)


def unwatch_calls(model: PreTrainedModel) -> None:
    """Undoes `watch_calls`, but for a model that our auto classes loaded, which is watched from then on."""
    if hasattr(model, "easytorch_report"):
        return
    for key in [key for key, hook in model._forward_pre_hooks.items() if hook is _check_call]:
        del model._forward_pre_hooks[key]
        model._forward_pre_hooks_with_kwargs.pop(key, None)


def _check_call(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("adapter_names") is not None:
        raise ValueError(
            f"{type(model).__name__} is transformers' own class and does not carry adapter_names, an adapter for each "
            "row: put the adapters in by peft.PeftModel, or call easytorch.protocol.generate"
        )
    check_own_cache(model, kwargs)
