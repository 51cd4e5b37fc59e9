"""Images as tokens: patches, and learned positions of a grid resized to that of another image.

Legend: B batch, C channels, N patches, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from easytorch.layers.basics import without_adapter


def pair(size: Any) -> tuple[int, int]:
    """(height, width) of a size that may be a single int for both."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def grid_of(config: Any) -> tuple[int, int]:
    """The patches of an image of `config.image_size`, down and across. `ValueError` where there is none."""
    sizes, patches = pair(config.image_size), pair(config.patch_size)
    if min(patches) < 1 or min(size // patch for size, patch in zip(sizes, patches, strict=True)) < 1:
        raise ValueError(
            f"{config.model_type}: config.image_size={config.image_size} holds no patch of "
            f"config.patch_size={config.patch_size}"
        )
    return sizes[0] // patches[0], sizes[1] // patches[1]


def patch_projection(config: Any, *, bias: bool = True) -> nn.Conv2d:
    """The convolution that embeds each patch."""
    patch = pair(config.patch_size)
    return nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=patch, stride=patch, bias=bias)


def patch_tokens(projection: nn.Module, pixel_values: torch.Tensor | None) -> torch.Tensor:
    """pixel_values (B, C, height, width) in any float dtype -> (B, N, D) in that of the projection."""
    if pixel_values is None:
        raise ValueError("You have to specify pixel_values")
    weight: Any = projection.weight
    channels = without_adapter(projection).in_channels
    if pixel_values.dim() != 4 or pixel_values.shape[1] != channels:
        raise ValueError(
            f"pixel_values {tuple(pixel_values.shape)} must be (batch, {channels}, height, width): the config has "
            f"num_channels={channels}"
        )
    return projection(pixel_values.to(weight.dtype)).flatten(2).transpose(1, 2)


def check_image_size(pixel_values: torch.Tensor, image_size: Any) -> None:
    """`ValueError` for an image of another size than that of the positions, which are not to be resized."""
    size, expected = tuple(pixel_values.shape[-2:]), pair(image_size)
    if size != expected:
        raise ValueError(
            f"Input image size ({size[0]}*{size[1]}) doesn't match model ({expected[0]}*{expected[1]}); pass "
            f"interpolate_pos_encoding=True to resize its positions"
        )


def resized_positions(
    positions: torch.Tensor, grid: tuple[int, int], wanted: tuple[int, int], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Position embeddings (1, P + N, D), P of them of prefix tokens -> (1, P + N', D) of the `wanted` grid, bicubic.

    dtype: in which they are resized, that of the positions unless given.
    """
    if grid == wanted and not torch.jit.is_tracing():  # a trace is for every size
        return positions
    before = positions.shape[1] - grid[0] * grid[1]
    image = positions[:, before:].unflatten(1, grid).permute(0, 3, 1, 2)
    image = F.interpolate(image.to(dtype or image.dtype), size=wanted, mode="bicubic", align_corners=False)
    resized = image.to(positions.dtype).flatten(2).transpose(1, 2)
    return torch.cat((positions[:, :before], resized), dim=1) if before else resized


def masked_tokens(
    tokens: torch.Tensor, mask_token: torch.Tensor | None, bool_masked_pos: torch.Tensor | None
) -> torch.Tensor:
    """tokens (B, N, D), those that bool_masked_pos (B, N) marks replaced by the mask token (..., D)."""
    if bool_masked_pos is None:
        return tokens
    if mask_token is None:
        raise ValueError("bool_masked_pos needs a mask token, which this model was built without")
    return torch.where(bool_masked_pos[..., None].bool(), mask_token.to(tokens.dtype), tokens)
