"""How far apart two results are, and whether the distance is rounding, which float64 decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from easytorch.auto.inputs import Inputs

Tensors = list[torch.Tensor]

# Relative RMS. Both sides compute in float32, where the order of a sum is worth 1e-6; a mask that is misread changes
# the outputs by more than 1e-2 with weights as large as these.
TOLERANCE = 1e-4
# Where sums cancel, transformers' own float32 results are off by more than that: by how many times as much ours may be.
TIMES_THEIRS = 10.0
NO_DIGIT = 0.5


def difference(given: Tensors, expected: Tensors, tolerance: float = TOLERANCE) -> str | None:
    """None, or by how much `given` is off. Where transformers' own is not finite nothing is asked of ours."""
    if [tensor.shape for tensor in given] != [tensor.shape for tensor in expected]:
        return "outputs of other shapes"
    worst = 0.0
    known = [right.isfinite() for right in expected]
    sizes = [_rms(right, finite) for right, finite in zip(expected, known, strict=True)]
    scale = max(sizes, default=0.0)
    for ours, right, finite, size in zip(given, expected, known, sizes, strict=True):
        off = _rms(ours - right, finite)
        if off != off or off == float("inf"):
            return "numbers that are not finite"
        if size > 1e-6 * scale:  # a gradient that is nothing but rounding says nothing
            worst = max(worst, off / size)
    return f"off by {worst:.2%}" if worst > tolerance else None


def is_rounding(given: Tensors, expected: Tensors, given_in_float64: Tensors, expected_in_float64: Tensors) -> bool:
    """Whether `given` and `expected`, in float32, differ because they were rounded.

    Then the same calls in float64 agree, and ours are about as far from those as transformers' own are. What has no
    right digit in transformers' own either (gradients through many layers that each multiply them) is left to float64.
    """
    if difference(given_in_float64, expected_in_float64) is not None:
        return False
    for ours, right, exact in zip(given, expected, expected_in_float64, strict=True):
        if right.shape != exact.shape:
            return False
        known = right.isfinite() & exact.isfinite()
        theirs, size = _rms(right - exact, known), _rms(exact, known)
        if theirs > NO_DIGIT * size:
            continue
        allowed = max(TIMES_THEIRS * theirs, TOLERANCE * size)
        if not _rms(ours - exact, known) <= allowed:
            return False
    return True


@contextmanager
def in_float64(model: nn.Module, inputs: Inputs) -> Iterator[Inputs]:
    """`model` in float64 meanwhile, and `inputs` that are."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype == torch.float32]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        yield {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    finally:
        torch.set_default_dtype(default)
        for tensor in tensors:
            tensor.data = tensor.data.float()  # the numbers that were there


def _rms(tensor: torch.Tensor, known: torch.Tensor) -> float:
    """The root mean square of the elements where `known` is True."""
    chosen = tensor if known.all() else tensor[known]
    return chosen.double().square().mean().sqrt().item() if chosen.numel() else 0.0
