"""Small inputs for a model of any architecture: tokens, pixels, spectra or waves, as its forward asks for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from easytorch.auto.tiny import configs_in

Inputs = dict[str, Any]

BATCH, LENGTH = 2, 9
_FIRST_ID, _LAST_ID = 20, 200  # between the ids that mean something and those moved into a small vocabulary


def candidates(model: PreTrainedModel, seed: int = 0) -> Iterator[Inputs]:
    """What `model` may be called with, the likeliest first; whoever asks tries them."""
    names = [name for name in inspect.signature(model.forward).parameters if name not in ("args", "kwargs")]
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    if "input_ids" in names:
        yield from _tokens(config, names, generator)
    if "pixel_values" in names:
        for pixels in _pixels(config, generator):
            yield {"pixel_values": pixels}
            if "input_ids" in names:
                yield from ({"pixel_values": pixels, **tokens} for tokens in _tokens(config, names, generator))
    if "pixel_values_videos" in names:
        yield from ({"pixel_values_videos": pixels} for pixels in _videos(config, generator))
    if "grid_thw" in names and names[0] in ("hidden_states", "pixel_values"):
        yield from _patches(config, names, generator)
    if "input_features" in names:
        for features in _spectra(config, generator):
            yield {"input_features": features} | _decoder(config, names, generator)
    if "input_values" in names:
        yield {"input_values": torch.randn(BATCH, 4000, generator=generator)} | _decoder(config, names, generator)
        bins = _first(config, "num_mel_bins", 16)
        length = _first(config, "max_length", 64)
        yield {"input_values": torch.randn(BATCH, length, bins, generator=generator)}
        yield {"input_values": torch.randn(BATCH, 1, 4000, generator=generator)}
    if "inputs_embeds" in names:
        width = _first(config, "hidden_size", 32)
        yield {"inputs_embeds": torch.randn(BATCH, LENGTH, width, generator=generator)}
    if "hidden_states" in names and "grid_thw" not in names:
        width = _first(config, "hidden_size", 32)
        yield {"hidden_states": torch.randn(BATCH, LENGTH, width, generator=generator)}


def _tokens(config: PreTrainedConfig, names: list[str], generator: torch.Generator) -> Iterator[Inputs]:
    vocabulary = _first(config, "vocab_size", 32)
    first, last = (_FIRST_ID, _LAST_ID) if vocabulary > _LAST_ID else (vocabulary // 4, vocabulary)
    ids = torch.randint(first, last, (BATCH, LENGTH), generator=generator)
    inputs: Inputs = {"input_ids": ids} | _decoder(config, names, generator)
    if "bbox" in names:
        corner = torch.randint(0, 50, (BATCH, LENGTH, 2), generator=generator)
        inputs["bbox"] = torch.cat((corner, corner + 20), -1)
    yield inputs
    if "char_input_ids" in names or _first(config, "num_codebooks", 0):
        books = _first(config, "num_codebooks", 1)
        yield {**inputs, "input_ids": ids[..., None].expand(-1, -1, books).contiguous()}


def _decoder(config: PreTrainedConfig, names: list[str], generator: torch.Generator) -> Inputs:
    if "decoder_input_ids" not in names:
        return {}
    vocabulary = min(_first(config, "decoder_vocab_size", 0) or _first(config, "vocab_size", 32), _LAST_ID)
    return {"decoder_input_ids": torch.randint(vocabulary // 4, vocabulary, (BATCH, LENGTH), generator=generator)}


def _pixels(config: PreTrainedConfig, generator: torch.Generator) -> Iterator[torch.Tensor]:
    channels = _first(config, "num_channels", 3)
    height, width = _sides(config)
    yield torch.randn(BATCH, channels, height, width, generator=generator)
    yield torch.randn(BATCH, _first(config, "num_frames", 2), channels, height, width, generator=generator)


def _videos(config: PreTrainedConfig, generator: torch.Generator) -> Iterator[torch.Tensor]:
    frames = _first(config, "frames_per_clip", 0) or _first(config, "num_frames", 2)
    height, width = _sides(config)
    yield torch.randn(BATCH, frames, _first(config, "num_channels", 3), height, width, generator=generator)


def _patches(config: PreTrainedConfig, names: list[str], generator: torch.Generator) -> Iterator[Inputs]:
    channels = _first(config, "num_channels", 0) or _first(config, "in_channels", 3)
    patch, frames = _first(config, "patch_size", 14), _first(config, "temporal_patch_size", 1)
    sides = 2 * (_first(config, "spatial_merge_size", 1) or 1)
    grid = torch.tensor([[1, sides, sides]] * BATCH)
    flat = channels * frames * patch * patch
    rows = torch.randn(BATCH * sides * sides, flat, generator=generator)
    yield {names[0]: rows, "grid_thw": grid}


def _spectra(config: PreTrainedConfig, generator: torch.Generator) -> Iterator[torch.Tensor]:
    bins = _first(config, "num_mel_bins", 0) or _first(config, "feature_size", 0) or _first(config, "input_dim", 80)
    length = 2 * _first(config, "max_source_positions", 16)
    yield torch.randn(BATCH, bins, length, generator=generator)
    yield torch.randn(BATCH, length, bins, generator=generator)
    yield torch.randn(BATCH, length, _first(config, "feature_projection_input_dim", bins), generator=generator)


def _sides(config: PreTrainedConfig) -> tuple[int, int]:
    size = _first(config, "image_size", 0) or _first(config, "img_size", 64)
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


def _first(config: PreTrainedConfig, name: str, default: Any) -> Any:
    """The value of the outermost config that has one."""
    found = (getattr(part, name, None) for part in configs_in(config))
    return next((value for value in found if value), default)
