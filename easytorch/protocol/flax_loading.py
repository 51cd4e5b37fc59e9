"""Loading checkpoints that transformers cannot read, such as Flax's: `from_pretrained` gets a state dict instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from easytorch.bridge.core.config import Config
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.state import load_torch_state_dict, stored_tensors
from easytorch.protocol.checkpoint_files import HUB_ARGUMENTS, FlaxFile


def load_flax(
    load: Callable[..., Any],
    config_class: Any,
    flax: FlaxFile,
    name_or_path: Any,
    config: Any,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
    files: ExitStack | None = None,
) -> tuple[Any, dict[str, Any], Mapping[str, Any]]:
    """(model, loading info, weights) of `load`, a `from_pretrained`, given the checkpoint's weights as a state dict.

    dtype: None and "auto" mean the checkpoint's dtype, as for a torch checkpoint whose config has none.
    files: the weights are read in parts, as `load` takes them, and the checkpoint is open until this is closed.
    """

    def read(made: PreTrainedConfig) -> tuple[PreTrainedConfig, Mapping[str, Any]]:
        content = Config(flax.path.parent / "config.json", made.to_dict())
        state_dict: Mapping[str, Any]
        if files is None:
            state_dict = load_torch_state_dict(flax.path, config=content, found=flax.found)
        else:
            state_dict = files.enter_context(stored_tensors(flax.path, config=content, found=flax.found))
        if not state_dict:
            raise CheckpointError("holds no weights; save it again", file=flax.path)
        return made, state_dict

    return load_state_dict(load, config_class, flax.path, name_or_path, config, model_args, kwargs, read=read)


def load_state_dict(
    load: Callable[..., Any],
    config_class: Any,
    path: Path,
    name_or_path: Any,
    config: Any,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    read: Callable[[PreTrainedConfig], tuple[PreTrainedConfig, Mapping[str, Any]]],
) -> tuple[Any, dict[str, Any], Mapping[str, Any]]:
    """`load_flax` of any checkpoint at `path`. read: its config -> the config to build a model of, and its weights."""
    where = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    # A config takes whatever it is given, and "auto" is no dtype it could have.
    dtype = {name: kwargs.pop(name) for name in ("dtype", "torch_dtype") if name in kwargs}
    if not isinstance(config, PreTrainedConfig):
        config, kwargs = config_class.from_pretrained(
            name_or_path if config is None else config, return_unused_kwargs=True, **where, **kwargs
        )
    config, state_dict = read(config)
    model, info = load(None, *model_args, config=config, state_dict=state_dict, **dtype, **kwargs)
    model.name_or_path = model.config.name_or_path = str(name_or_path)
    if model.can_generate():
        for folder in (path, *path.parents[:2]):  # a checkpoint that is a folder may stand in the model's
            if (folder / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(folder)
                break
    return model, info, state_dict
