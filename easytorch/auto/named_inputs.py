"""Inputs by the names of a forward's parameters, for models that want more than tokens or an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from easytorch.auto.tiny import configs_in

BATCH, LENGTH = 2, 9
LAYOUTS = 6  # arrangements of the dimensions to try; makers with fewer repeat them
_FIRST_ID, _LAST_ID = 20, 200  # between the special ids and those moved into a small vocabulary
_ROWS, _STEPS = 4, 16  # patches along each side of an image; queries, steps and latents where the config says nothing
_SAMPLES = 3840  # samples of a waveform: a multiple of the frame length at 12.5, 25 and 50 Hz


@dataclass
class Maker:
    """Makes tensors for a model of `config`. layout: the number of the arrangement to take where there are several."""

    config: PreTrainedConfig
    generator: torch.Generator
    layout: int = 0

    def first(self, name: str, default: Any) -> Any:
        """The value of the outermost config that has one."""
        found = (getattr(part, name, None) for part in configs_in(self.config))
        return next((value for value in found if value), default)

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def tokens(self, length: int = LENGTH, vocabulary: int = 0) -> torch.Tensor:
        vocabulary = vocabulary or self.first("vocab_size", 32)
        first, last = (_FIRST_ID, _LAST_ID) if vocabulary > _LAST_ID else (vocabulary // 4, vocabulary)
        ids = torch.randint(first, last, (BATCH, length), generator=self.generator)
        if self.layout % 2:
            return ids[..., None].repeat(1, 1, self.first("num_codebooks", 1))
        return ids

    def boxes(self) -> torch.Tensor:
        corner = torch.randint(0, 50, (BATCH, LENGTH, 2), generator=self.generator)
        return torch.cat((corner, corner + 20), -1)

    def sides(self) -> tuple[int, int]:
        size = self.first("image_size", 0) or self.first("img_size", 0) or self.first("max_img_size", 64)
        return (size, size) if isinstance(size, int) else (size[0], size[-1])

    def patch(self) -> int:
        size = self.first("patch_size", 14)
        return size if isinstance(size, int) else size[-1]

    def patch_numbers(self) -> int:
        channels = self.first("num_channels", 0) or self.first("in_channels", 3)
        frames = self.first("temporal_patch_size", 1)
        return int(channels * frames * self.patch() ** 2)

    def rows(self) -> int:
        """Patches along each side, which the model may merge by squares."""
        return 2 * (self.first("spatial_merge_size", 0) or _ROWS // 2)

    def length_of_past(self) -> int:
        lags = self.first("lags_sequence", [0])
        return self.first("context_length", 0) + (max(lags) if self.layout % 2 else 0) or _STEPS

    def make(self, name: str, names: list[str]) -> torch.Tensor | None:
        """A value for the parameter `name` of a forward with parameters `names`; None if the name is not known."""
        if name in ("pixel_values", "hidden_states") and not _AS_PATCHES.isdisjoint(names):
            return self._as_patches(names)
        return _MAKERS[name](self) if name in _MAKERS else None

    def _as_patches(self, names: list[str]) -> torch.Tensor:
        count, side = self.rows() ** 2, self.patch()
        channels = self.first("num_channels", 3)
        if "target_sizes" in names:  # images of several sizes, patch beside patch
            return self.numbers(1, channels, side, BATCH * count * side)
        if not {"spatial_shapes", "pixel_position_ids"}.isdisjoint(names):
            return self.numbers(BATCH, count, self.patch_numbers())
        if self.layout % 2:
            return self.numbers(BATCH * count, channels, side, side)
        return self.numbers(BATCH * count, self.patch_numbers())

    def _pixels(self) -> torch.Tensor:
        channels = self.first("num_channels", 3)
        frames = (self.first("num_frames", 2),) if self.layout % 2 else ()
        return self.numbers(BATCH, *frames, channels, *self.sides())

    def _videos(self) -> torch.Tensor:
        frames = self.first("frames_per_clip", 0) or self.first("num_frames", 2)
        return self.numbers(BATCH, frames, self.first("num_channels", 3), *self.sides())

    def _bins(self) -> int:
        names = ("num_mel_bins", "feature_size", "n_mels", "input_feat_size", "input_size", "input_dim", "num_bins")
        return next((size for name in names if (size := self.first(name, 0))), 80)

    def _spectrum(self) -> torch.Tensor:
        length = 2 * self.first("max_source_positions", _STEPS)
        shapes = ((self._bins(), length), (length, self._bins()), (1, length, self._bins()))
        return self.numbers(BATCH, *shapes[self.layout % 3])

    def _spectrum_mask(self) -> torch.Tensor:
        return torch.ones(BATCH, 2 * self.first("max_source_positions", _STEPS), dtype=torch.long)

    def _wave(self) -> torch.Tensor:
        spectrum = (self.first("max_length", 64), self.first("num_mel_bins", 16))
        return self.numbers(BATCH, *((_SAMPLES,), spectrum, (1, _SAMPLES))[self.layout % 3])

    def _past(self) -> torch.Tensor:
        length, channels = self.length_of_past(), self.first("num_input_channels", 0) or self.first("input_size", 1)
        return self.numbers(BATCH, length, *((channels,) if channels > 1 or self.layout % 3 == 2 else ()))

    def _future(self) -> torch.Tensor:
        return self.numbers(BATCH, self.first("prediction_length", 1))

    def _times(self, length: int) -> torch.Tensor:
        return self.numbers(BATCH, length, self.first("num_time_features", 0))

    def _positions(self) -> torch.Tensor:
        rows = torch.arange(self.rows())
        return torch.cartesian_prod(rows, rows)[None].repeat(BATCH, 1, 1)

    def _marked(self) -> torch.Tensor:
        mask = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        mask[:, 1 : 1 + self.first("latent_query_num", 1)] = 1
        return mask


# Parameters that indicate an image given as rows of patches.
_AS_PATCHES = {"grid_thw", "image_grid_thw", "spatial_shapes", "target_sizes", "pixel_position_ids"}


def _grid(maker: Maker) -> torch.Tensor:
    return torch.tensor([[1, maker.rows(), maker.rows()]] * BATCH)


def _sizes(maker: Maker) -> torch.Tensor:
    return torch.tensor([[maker.rows()] * 2] * BATCH)


def _states(maker: Maker) -> torch.Tensor:
    return maker.numbers(BATCH, _STEPS, maker.first("hidden_size", 32))


_MAKERS: dict[str, Callable[[Maker], torch.Tensor]] = {
    "input_ids": Maker.tokens,
    "qformer_input_ids": Maker.tokens,
    "task_inputs": lambda maker: maker.tokens(maker.first("task_seq_len", LENGTH)),
    "text_inputs": Maker.tokens,
    "decoder_input_ids": lambda maker: maker.tokens(vocabulary=maker.first("decoder_vocab_size", 0)),
    "lang_ids": lambda maker: torch.zeros(BATCH, dtype=torch.long),
    "pixel_values": Maker._pixels,
    "prompt_pixel_values": Maker._pixels,
    "prompt_masks": Maker._pixels,
    "pixel_values_videos": Maker._videos,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "merge_sizes": lambda maker: torch.full((BATCH,), maker.first("spatial_merge_size", 2)),
    "spatial_shapes": _sizes,
    "target_sizes": _sizes,
    "pixel_position_ids": Maker._positions,
    "pixel_attention_mask": lambda maker: torch.ones(BATCH, maker.rows() ** 2, dtype=torch.long),
    "image_attention_mask": lambda maker: torch.ones(BATCH, LENGTH, 2, dtype=torch.long),
    "image_embeds_position_mask": Maker._marked,
    "flattened_patches": lambda maker: maker.numbers(BATCH, _STEPS, maker.patch_numbers() + 2).abs().ceil(),
    "input_features": Maker._spectrum,
    "audio_mel": Maker._spectrum,
    "input_features_mask": Maker._spectrum_mask,
    "feature_attention_mask": Maker._spectrum_mask,
    "audio_mel_mask": lambda maker: maker._spectrum_mask() == 0,
    "is_longer": lambda maker: torch.ones(BATCH, 1, dtype=torch.bool),
    "input_values": Maker._wave,
    "inputs_embeds": lambda maker: maker.numbers(BATCH, LENGTH, maker.first("hidden_size", 32)),
    "hidden_states": lambda maker: maker.numbers(BATCH, LENGTH, maker.first("hidden_size", 32)),
    "bbox": Maker.boxes,
    "past_values": Maker._past,
    "past_values_padding": lambda maker: torch.zeros(BATCH, maker.length_of_past()),
    "past_observed_mask": lambda maker: torch.ones_like(maker._past()),
    "past_time_features": lambda maker: maker._times(maker.length_of_past()),
    "future_values": Maker._future,
    "future_time_features": lambda maker: maker._times(maker.first("prediction_length", 1)),
    "freq": lambda maker: torch.zeros(BATCH, 1, dtype=torch.long),
    "states": lambda maker: maker.numbers(BATCH, LENGTH, maker.first("state_dim", 1)),
    "actions": lambda maker: maker.numbers(BATCH, LENGTH, maker.first("act_dim", 1)),
    "rewards": lambda maker: maker.numbers(BATCH, LENGTH, 1),
    "returns_to_go": lambda maker: maker.numbers(BATCH, LENGTH, 1),
    "timesteps": lambda maker: torch.arange(LENGTH).repeat(BATCH, 1),
    "visual_feats": lambda maker: maker.numbers(BATCH, 5, maker.first("visual_feat_dim", 1)),
    "visual_pos": lambda maker: maker.numbers(BATCH, 5, maker.first("visual_pos_dim", 4)),
    "query_embeds": _states,
    "noise_embeds": _states,
    "context_hidden_states": _states,
    "action_embeds": lambda maker: maker.numbers(BATCH, maker.first("chunk_size", 4), maker.first("hidden_size", 32)),
    "latents": _states,
}
