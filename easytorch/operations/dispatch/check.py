"""`EASYTORCH_CHECK`: the result of an implementation compared with that of the definition."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from easytorch.operations.dispatch.impl import Choice

# Relative RMS error allowed between an implementation and the definition in the same dtype (docs/add-an-operation.md).
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class OperationMismatchError(AssertionError):
    """`EASYTORCH_CHECK=1` found an implementation that differs from its definition."""


def relative_rms_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over RMS of `expected`, in float64; infinite where only one has a NaN or an infinity."""
    got, expected = got.detach().double(), expected.detach().double()
    if got.numel() == 0:
        return 0.0
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(got)) or not torch.equal(
        got[~finite].nan_to_num(), expected[~finite].nan_to_num()
    ):
        return float("inf")
    difference = (got[finite] - expected[finite]).square().mean().sqrt()
    scale = expected[finite].square().mean().sqrt()
    return float(difference if scale == 0 else difference / scale) if finite.any() else 0.0


def compare_with_definition(choice: Choice, result: Any, expected: Any) -> None:
    """Raise `OperationMismatchError` where a tensor of `result` differs from `expected`; None is not compared."""
    pairs = _pairs("output", result, expected)
    if not pairs:
        _raise(choice, "output", f"{type(result).__name__} has no tensor beside one of {type(expected).__name__}")
    for field, got, want in pairs:
        device = got.device.type
        lowered = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if got.shape != want.shape or (got.dtype != want.dtype and lowered is None):
            _raise(choice, field, f"{got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}")
        error, tolerance = relative_rms_error(got, want), TOLERANCE.get(got.dtype, 0.0)
        if lowered is not None:  # each rounds where autocast lowers an operation of ATen: to another step of the call
            tolerance = max(tolerance, 2 * TOLERANCE.get(lowered, 0.0))
        if not error <= tolerance:
            _raise(choice, field, f"relative RMS error {error:.3g}, allowed {tolerance:.3g} in {got.dtype}")


def _raise(choice: Choice, field: str, what: str) -> None:
    raise OperationMismatchError(
        f"EASYTORCH_CHECK: {choice.implementation} ({choice.backend}, {choice.platform}) differs from its definition "
        f"in {field}: {what}. Force another with EASYTORCH_OPS, and report this call."
    )


def _pairs(field: str, got: Any, want: Any) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """The tensors of two results of the same structure, side by side, with the name of each."""
    if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
        return [(field, got, want)]
    if isinstance(got, tuple | list):
        return [pair for i, (a, b) in enumerate(zip(got, want, strict=True)) for pair in _pairs(f"{field}[{i}]", a, b)]
    if dataclasses.is_dataclass(got):
        names = [f.name for f in dataclasses.fields(got)]
        return [pair for n in names for pair in _pairs(n, getattr(got, n), getattr(want, n))]
    return []
