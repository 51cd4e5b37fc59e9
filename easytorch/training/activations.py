"""Layers that compute activations again in the backward pass, and layers that are compiled, by torch's own means."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from easytorch.training.config import TrainingConfig, flag
from easytorch.training.float8 import use_float8

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_scaled_mm")


def checkpoint_and_compile(model: PreTrainedModel, config: TrainingConfig) -> None:
    """What the config asks for of both, and of products in float8, before the model is sharded: the layer that is
    computed again is the compiled one, and FSDP2 gathers it around both."""
    if config.dtype == "float8":
        use_float8(model)
    if config.activation_checkpointing != "none":
        checkpoint_activations(model, config)
    if config.compile:
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(f"{flag('compile')}: {type(model).__name__} has no layers of transformers' kind")
        for layer in layers:
            layer.compile()


def checkpoint_activations(model: PreTrainedModel, config: TrainingConfig) -> None:
    """Every n-th layer of the model computes again in its backward pass what it has not kept.

    By transformers' switch, inside of the layer's call, so around FSDP2's hooks of it.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if config.activation_checkpointing == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    every = config.activation_checkpointing_every
    try:
        enable(settings, **({"every_n_layers": every} if every > 1 else {}))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{flag('activation_checkpointing')} {config.activation_checkpointing}: {error}") from error
    if config.device == "xla":
        # torch's own function: XLA would find that both computations are one, and keep its results
        from torch_xla.utils.checkpoint import checkpoint

        layers: list[Any] = [one for one in model.modules() if hasattr(one, "_gradient_checkpointing_func")]
        for layer in layers:
            layer._gradient_checkpointing_func = checkpoint


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Matrix products and attention are kept, which take the time; norms, activations and rotary are computed again."""
    name = operator.name() if isinstance(operator, torch._ops.OpOverload) else str(operator)
    namespace, _, rest = name.partition("::")
    rest = rest.partition(".")[0]
    kept = (namespace == "aten" and rest in _PRODUCTS) or "attention" in rest or "flash_forward" in rest
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
