"""`convert --verify`: reads every tensor back and, where a jax forward exists, runs both models on the same inputs."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from easytorch.bridge.checkpoint import Checkpoint, open_checkpoint
from easytorch.bridge.core.compare import identical
from easytorch.bridge.core.config import Config, settings_of
from easytorch.bridge.core.nested import nested
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.sizes import human_size
from easytorch.bridge.dtypes import FLOATING
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import WritableFormat
from easytorch.bridge.schemes.registry import TORCH

# Of float32 arithmetic in another order, relative to the largest output.
TOLERANCE = 1e-4

_LENGTH = 12
# What transformers finds in a folder of torch weights; DCP, for one, it does not.
_LOADED = tuple(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json"))
_SEED = 0


@dataclass(frozen=True)
class _Forward:
    """A function of `bridge.forwards` and the inputs it takes: ids of one or two sequences, or pixels."""

    module: str
    function: str
    inputs: Callable[[Any, np.random.Generator], dict[str, np.ndarray]]


def _ids(settings: Any, rng: np.random.Generator) -> np.ndarray:
    special = {getattr(settings, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
    plain = [token for token in range(min(settings.vocab_size, 1000)) if token not in special]
    return rng.choice(plain, (2, _LENGTH)).astype(np.int32)


def _text(settings: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"input_ids": _ids(settings, rng)}


def _two_texts(settings: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"input_ids": _ids(settings, rng), "decoder_input_ids": _ids(settings, rng)}


def _pixels(settings: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    size = settings.image_size
    return {"pixel_values": rng.normal(size=(2, settings.num_channels, size, size)).astype(np.float32)}


_FORWARDS = {
    "bert": _Forward("encoder", "bert", _text),
    "roberta": _Forward("encoder", "roberta", _text),
    "xlm-roberta": _Forward("encoder", "roberta", _text),
    "llama": _Forward("decoder", "llama", _text),
    "mistral": _Forward("decoder", "llama", _text),
    "gemma": _Forward("decoder", "gemma", _text),
    "gpt2": _Forward("decoder", "gpt2", _text),
    "t5": _Forward("encoder_decoder", "t5", _two_texts),
    "vit": _Forward("vision", "vit", _pixels),
}


@dataclass(frozen=True)
class OutputCheck:
    """`difference` is the largest of the logits, or hidden states, relative to their largest; None without a run."""

    difference: float | None
    note: str | None = None


def wrong_tensor(path: Path, format_: WritableFormat, reader: Reader) -> str | None:
    """The first tensor that the checkpoint in `format_` at `path` does not hold as `reader` gives it."""
    file = format_.detect(path)
    assert file is not None, f"{format_.name} does not find what it has written"
    with format_.open(file) as written:
        for name, info in reader.tensors.items():
            if name not in written.tensors:
                return name
            if not identical(written.read(name), format_.reads_back(info, reader.read(name))):
                return name
    return None


def compare_sides(checkpoint: Checkpoint, source: Path, written: Path, scheme: str) -> OutputCheck:
    """`compare_outputs` of a conversion's source and result in `scheme`, if one is a folder of torch weights."""
    if checkpoint.config is None or checkpoint.scheme == scheme or not (source.is_dir() and written.is_dir()):
        return OutputCheck(None)
    if TORCH not in (checkpoint.scheme, scheme):
        return OutputCheck(None, "outputs were not compared: neither side is torch's")
    torch_folder = source if checkpoint.scheme == TORCH else written
    if not any((torch_folder / name).is_file() for name in _LOADED):
        return OutputCheck(None, "outputs were not compared: transformers does not load the torch side's format")
    if checkpoint.scheme != TORCH:
        # The open one: of a run or a training state, what the user chose of it.
        return _compare(torch_folder, checkpoint, checkpoint.config)
    if checkpoint.dropped:
        return OutputCheck(None, "outputs were not compared: transformers would load what was dropped")
    return compare_outputs(torch_folder, written, checkpoint.config)


def compare_outputs(torch_folder: Path, other: Path, config: Config) -> OutputCheck:
    """Runs transformers' model of `torch_folder` and the jax forward over the weights at `other`, both in float32.

    `CheckpointError` when they differ by more than `TOLERANCE`.
    """
    with open_checkpoint(other, config=config) as checkpoint:
        return _compare(torch_folder, checkpoint, config)


def _compare(torch_folder: Path, other: Checkpoint, config: Config) -> OutputCheck:
    forward = _FORWARDS.get(config.model_type)
    if forward is None:
        return OutputCheck(None, f"outputs were not compared: no jax forward of {config.model_type!r} is here")
    if importlib.util.find_spec("jax") is None:
        return OutputCheck(None, "outputs were not compared: jax is not installed")
    settings = settings_of(config)
    if (reason := _not_carried(settings)) is not None:
        return OutputCheck(None, f"outputs were not compared: the jax forward does not carry {reason}")
    inputs = forward.inputs(settings, np.random.default_rng(_SEED))
    if (reason := _unfit(other)) is not None:
        return OutputCheck(None, f"outputs were not compared: {reason}")
    got, with_head = _jax_outputs(forward, other, settings, inputs)
    expected = _torch_outputs(torch_folder, config, other.architecture.base, inputs, with_head)
    if not np.isfinite(expected).all() and not np.isfinite(got).all():
        return OutputCheck(None, "outputs were not compared: they are not finite numbers")
    difference = float(np.abs(got - expected).max() / max(np.abs(expected).max(), np.finfo(np.float32).tiny))
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"computes something else in torch and in jax: outputs differ by {difference:.2g} of their size "
            f"({TOLERANCE:.0e} allowed)",
            file=config.file,
        )
    return OutputCheck(difference)


def _not_carried(settings: Any) -> str | None:
    """The setting in the config that `bridge.forwards` does not implement, if any."""
    rope = getattr(settings, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        return f"rope type {rope['rope_type']!r}"
    if getattr(settings, "position_embedding_type", "absolute") not in ("absolute", None):
        return f"position_embedding_type {settings.position_embedding_type!r}"
    if getattr(settings, "scale_attn_by_inverse_layer_idx", False) or not getattr(settings, "scale_attn_weights", True):
        return "scores scaled by layer"
    if (getattr(settings, "sliding_window", None) or _LENGTH) < _LENGTH:
        return "a sliding window"
    if getattr(settings, "is_decoder", False) and settings.model_type in ("bert", "roberta", "xlm-roberta"):
        return "an encoder used as a decoder"
    if (
        getattr(settings, "max_position_embeddings", None) is not None
        and settings.max_position_embeddings < _LENGTH + 2
    ):
        return f"a position table under {_LENGTH + 2} rows"
    return None


def _unfit(checkpoint: Checkpoint) -> str | None:
    """Why the models cannot be run: both, in float32, must fit into free memory."""
    tensors = checkpoint.weights.tensors.values()
    narrow = FLOATING - {"float64"}
    if odd := next((info for info in tensors if info.dtype not in narrow), None):
        return f"{odd.name} is {odd.dtype}"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 3 * 4 * sum(math.prod(info.shape) for info in tensors)
    return f"they need {human_size(needed)} of memory, {human_size(free)} are free" if needed > free else None


def _torch_outputs(
    folder: Path, config: Config, prefix: str, inputs: Mapping[str, np.ndarray], with_head: bool
) -> np.ndarray:
    """The logits of the whole model, else the last hidden states of the base model.

    Some heads hold that under another name than its own, and only they can read their weights.
    """
    import torch
    import transformers

    base: Any = transformers.MODEL_MAPPING[transformers.CONFIG_MAPPING[config.model_type]]
    headless = base.base_model_prefix == prefix and not with_head
    holder = base if headless else getattr(transformers, config.architecture or "")
    before, bar = transformers.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()  # that a base model leaves heads behind is no news here
    transformers.utils.logging.disable_progress_bar()
    try:
        model = holder.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    finally:
        transformers.logging.set_verbosity(before)
        if bar:
            transformers.utils.logging.enable_progress_bar()
    run = model if with_head or holder is base else model.base_model
    with torch.no_grad():
        outputs = run(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    made: torch.Tensor = outputs.logits if with_head else outputs.last_hidden_state
    return made.numpy()


def _jax_outputs(
    forward: _Forward, checkpoint: Checkpoint, settings: Any, inputs: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, bool]:
    """The logits where the head of the architecture is in `bridge.forwards`, else the last hidden states; and which."""
    import jax
    import jax.numpy as jnp

    from easytorch.bridge.forwards import heads

    function = getattr(importlib.import_module(f"easytorch.bridge.forwards.{forward.module}"), forward.function)
    with jax.default_device(jax.devices("cpu")[0]):
        reader = checkpoint.in_scheme("flax", strict=False).reader
        tree = nested({name: jnp.asarray(reader.read(name).astype(np.float32)) for name in reader.tensors})
        base, content = tree.get(checkpoint.architecture.base, tree), settings.to_dict()
        states = function(base, content, **{name: jnp.asarray(array) for name, array in inputs.items()})
        logits = heads.logits_of(checkpoint.architecture.name, tree, base, states, content)
        return np.asarray(states if logits is None else logits), logits is not None
