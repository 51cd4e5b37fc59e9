"""Positions in three dimensions, time, height and width, of text around images and videos (M-RoPE, arXiv:2409.12191).

Legend: B batch, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from easytorch.layers.masks import Masks
from easytorch.layers.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from easytorch.layers.decoder import DecoderBackbone as _Backbone
else:
    _Backbone = object  # the family's backbone comes after it among the bases

TEXT, IMAGE, VIDEO = 0, 1, 2  # the values of mm_token_type_ids
_NAMES = {IMAGE: "image", VIDEO: "video"}

Grid = list[int]  # time, height and width, in patches


def vision_positions(
    start: int, grid: Grid, merge: int, interval: float | torch.Tensor, device: torch.device | None
) -> torch.Tensor:
    """(3, N): positions of the N tokens of an image or video, the first of them at `start`.

    merge: patches of a side that become one token. interval: the distance between frames.
    """
    time, height, width = grid
    frames = (torch.arange(time, device=device) * interval).long()
    rows, columns = (torch.arange(size // merge, device=device) for size in (height, width))
    return torch.stack(torch.meshgrid(frames, rows, columns, indexing="ij")).reshape(3, -1) + start


def token_positions(
    token_types: torch.Tensor,
    grids: Mapping[int, Iterable[Grid]],
    merge: int,
    intervals: Iterable[float | torch.Tensor],
    attention_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """token_types (B, T) of `TEXT`, `IMAGE` and `VIDEO` -> positions (3, B, T), and deltas (B, 1): the next
    position of each row minus its number of tokens.

    Positions of text count up; an image or video starts at the next one, and the text after it at that plus the longer
    side. grids: those of images and of videos, in order. intervals: between frames, for each video.
    attention_mask (B, T): 0 for padding, which gets position 0.
    """
    of_kind = {kind: iter(found) for kind, found in grids.items()}
    apart = iter(intervals)
    positions = torch.zeros(3, *token_types.shape, dtype=torch.long, device=token_types.device)
    offsets = []
    for row, types in enumerate(token_types):
        real = slice(None) if attention_mask is None else attention_mask[row].bool()
        kinds = types[real].tolist()
        placed = torch.cat(list(_row(kinds, of_kind, merge, apart, types.device)), dim=1)
        if placed.shape[1] != len(kinds):
            raise ValueError(
                f"row {row}: the grids of its images and videos have {placed.shape[1]} tokens with the text, "
                f"mm_token_type_ids has {len(kinds)}; each must be marked once for each of its tokens"
            )
        positions[:, row, real] = placed
        offsets.append(placed.max() + 1 - len(kinds))
    return positions, torch.stack(offsets)[:, None]


def _row(
    kinds: list[int],
    of_kind: Mapping[int, Iterator[Grid]],
    merge: int,
    apart: Iterator[float | torch.Tensor],
    device: torch.device,
) -> Iterator[torch.Tensor]:
    """The positions (3, N) of each run of tokens of one kind."""
    start = 0
    for kind, run in itertools.groupby(kinds):
        if kind == TEXT:
            length = len(list(run))
            yield (torch.arange(length, device=device) + start).expand(3, -1)
            start += length
            continue
        grid = next(of_kind.get(kind, iter(())), None)
        if grid is None:
            name = _NAMES.get(kind, str(kind))
            raise ValueError(
                f"mm_token_type_ids marks more runs of {name} tokens than {name}_grid_thw has rows; it is 0 for text, "
                f"1 for images and 2 for videos, with text between two of them"
            )
        yield vision_positions(start, grid, merge, next(apart) if kind == VIDEO else 1, device)
        start += max(grid[1:]) // merge


class MultimodalRotaryEmbedding(RotaryEmbedding):
    """`RotaryEmbedding` of position_ids (B, T), (3, B, T) or, with text positions first, (4, B, T).

    (1, B, T): the same in all three, as `generate` has them of tokens after a cache.
    """

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if position_ids.dim() == 3 and position_ids.shape[0] == 1:
            position_ids = position_ids[0]
        return super().forward(x, position_ids[1:] if has_text(position_ids) else position_ids)


class MultimodalPositions(_Backbone):
    """A mixin of decoders: position_ids may be (3, B, T), time, height, width, or (4, B, T), text positions first.

    Packed sequences are detected from text positions; (B, T) are these where `plain_positions_pack`.
    """

    plain_positions_pack: ClassVar[bool] = True

    def make_masks(
        self, inputs_embeds: torch.Tensor, attention_mask: Any, cache: Any, position_ids: torch.Tensor | None
    ) -> Masks:
        if position_ids is not None and (position_ids.dim() == 3 or not self.plain_positions_pack):
            position_ids = position_ids[0] if has_text(position_ids) else None
        return super().make_masks(inputs_embeds, attention_mask, cache, position_ids)


def has_text(position_ids: torch.Tensor) -> bool:
    """True for position_ids (4, B, T)."""
    return position_ids.dim() == 3 and position_ids.shape[0] == 4
