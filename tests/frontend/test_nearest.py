"""`interpolate(mode="nearest")` by factors that end in the same sizes: ATen's kernels index them in two ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from easytorch import frontend

# size and factor: floor(size * factor) is the size or its double, which some kernels repeat whatever the factor is
CASES = [(2, 1.3), (3, 1.3), (4, 2.2), (6, 2.15), (30, 1.03), (100, 1.005), (5, 1.5), (7, 0.6)]


def images() -> list[torch.Tensor]:
    found = []
    for size, _ in CASES:
        found.append(torch.arange(2 * size).float().reshape(1, 2, size))
        for channels in (2, 4):
            flat = torch.arange(channels * 40 * size).float().reshape(1, channels, 40, size)
            solid = torch.arange(channels * 4 * size).float().reshape(1, channels, 2, 2, size)
            found += [flat, flat.contiguous(memory_format=torch.channels_last)]
            found += [solid, solid.contiguous(memory_format=torch.channels_last_3d)]
    return found


class Resized(torch.nn.Module):
    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.backward = backward

    def forward(self, *images: torch.Tensor) -> Any:
        found = []
        factors = dict(CASES)
        for image in images:
            size, spatial = image.shape[-1], image.dim() - 2
            factor = [1.0] * (spatial - 1) + [factors[size]]
            resized = F.interpolate(image, scale_factor=factor, mode="nearest", recompute_scale_factor=False)
            if self.backward:
                packet = getattr(torch.ops.aten, f"upsample_nearest{spatial}d_backward")
                resized = packet(resized, list(resized.shape[2:]), list(image.shape), *factor)
            found.append(resized)
        return found


@pytest.mark.parametrize("backward", [False, True])
def test_as_aten(backward: bool) -> None:
    module, given = Resized(backward), tuple(images())
    compiled = frontend.compile(module, given, backend="numpy")
    for got, expected, image in zip(compiled(*given), module(*given), given, strict=True):
        assert torch.equal(got, expected), (image.shape, image.stride())
