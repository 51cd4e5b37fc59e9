"""LoRA and QLoRA in a run: a pretrained model with an adapter, new or from a checkpoint, and merged at the end.

The protocol is imported where it is used: it takes as long as torch, and runs without an adapter start without it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import easytorch
from easytorch.bridge.storage.atomic import new_folder
from easytorch.training.checkpoint import OLDER, damaged
from easytorch.training.config import TrainingConfig, flag
from easytorch.training.disk import named_os_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = "adapter_model.safetensors"  # PEFT's name


def describe(config: TrainingConfig) -> str:
    frozen = f" over weights in {config.quantize}" if config.quantize is not None else ""
    return f"LoRA{frozen}: the adapter alone is trained, and has gradients and optimizer"


def load_adapted(
    config: TrainingConfig, checkpoint: Path | None, device: torch.device, chosen: dict[str, Any]
) -> PreTrainedModel:
    """The pretrained model on `device` with the config's adapter, whose values are those of `checkpoint`, if any."""
    from easytorch.protocol import QuantizationConfig, apply_lora_to_layers, merge_lora_params

    assert config.lora is not None
    if config.quantize is not None:
        chosen = {**chosen, "quantization_config": QuantizationConfig(config.quantize)}
    model: Any = easytorch.AutoModelForCausalLM.from_pretrained(str(config.model), **chosen)
    settings = {name: value for name, value in config.lora.items() if name in ("alpha", "dropout")}
    try:
        apply_lora_to_layers(model, config.lora["rank"], config.lora.get("pattern"), rngs=config.seed, **settings)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{flag('lora')}: {error}") from error
    if checkpoint is not None:
        path = checkpoint / WEIGHTS
        try:
            merge_lora_params(model, load_file(path))
        except (SafetensorError, ValueError, OSError) as error:
            raise damaged(path, error, OLDER.format(checkpoint)) from error
    # as transformers finds the model below a saved adapter
    model.peft_config["default"].base_model_name_or_path = str(config.model)
    adapted: PreTrainedModel = model.to(device)
    return adapted


def has_adapter(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "peft_config", None))


@contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model computes without its adapter.

    PEFT's own switch freezes the adapter's parameters and thaws them: over "fsdp" it froze the shards and thawed what
    was gathered of them, so that they stayed frozen.
    """
    from easytorch.protocol.adapters import wrapped_layers

    layers = list(wrapped_layers(model).values())
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def add_same_adapter(model: PreTrainedModel, adapted: PreTrainedModel) -> None:
    """Give `model`, of the class and config of `adapted`, an adapter in the layers that have one there."""
    settings: Any = adapted.peft_config["default"]
    model.add_adapter(copy.deepcopy(settings), "default")
    model.peft_config["default"] = settings  # with the name of the model below, as saved


def merge_saved(config: TrainingConfig, checkpoint: Path, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """`write_merged` of the pretrained model with the adapter of a checkpoint, which this process loads."""
    chosen: dict[str, Any] = {"dtype": torch.float32}
    write_merged(load_adapted(config, checkpoint, torch.device("cpu"), chosen), tokenizer, folder)


def write_merged(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Add the adapter to the weights of `model`, and write it as a model folder, which is replaced if it exists."""
    from easytorch.protocol import unwrap_lora_to_layers

    unwrap_lora_to_layers(model)
    with new_folder(folder, replace=True) as staging, named_os_errors(folder):
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
