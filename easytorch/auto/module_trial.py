"""Whether a module gives with our operations what it gives without: values and gradients, in three dtypes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from easytorch.auto.comparison import Tensors, difference
from easytorch.auto.failures import FAILURES, first_line
from easytorch.layers.specialised import operations_always

# Relative RMS in float32, of values and of gradients.
TOLERANCE = 1e-5
# In half precision both are compared with float64: by how many times as much ours may be off, and a quarter of the
# dtype's epsilon beside it, the mean rounding of one more result. Of a few numbers the errors are a matter of luck.
TIMES_THEIRS = 1.25
ONE_ROUNDING = 0.25
FEW, LUCK = 16, 4.0
HALVES = (torch.bfloat16, torch.float16)

Call = Callable[[nn.Module, Sequence[torch.Tensor]], Tensors]


def disagreement(stock: nn.Module, ours: nn.Module, inputs: Sequence[torch.Tensor]) -> str | None:
    """None where `ours` may stand for `stock`, both in float32 with the same weights; else how they differ.

    inputs: the arguments of one call; floating ones get gradients.
    """
    with operations_always():
        return _disagreement(stock, ours, inputs)


def _disagreement(stock: nn.Module, ours: nn.Module, inputs: Sequence[torch.Tensor]) -> str | None:
    try:
        for name, run in (("values", values), ("gradients", gradients)):
            given, expected = run(ours, inputs), run(stock, inputs)
            off = difference(given, expected, TOLERANCE) or _other_dtypes(given, expected)
            if off is not None:
                return f"{name} in float32 {off}"
        for dtype in HALVES:
            low, low_ours = (copy.deepcopy(one).to(dtype) for one in (stock, ours))
            halves = [_cast(one, dtype) for one in inputs]
            exact, doubles = copy.deepcopy(low).double(), [_cast(one, torch.float64) for one in halves]
            for name, run in (("values", values), ("gradients", gradients)):
                given, expected, truth = run(low_ours, halves), run(low, halves), run(exact, doubles)
                if (off := _other_dtypes(given, expected) or _rounds_worse(given, expected, truth)) is not None:
                    return f"{name} in {dtype} {off}".replace("torch.", "")
    except FAILURES as error:
        return first_line(error)
    return None


def distance_in_half(stock: nn.Module, ours: nn.Module, inputs: Sequence[torch.Tensor]) -> float:
    """How far apart both are in bfloat16, which tells formulas apart that round in other places."""
    halves = [_cast(one, torch.bfloat16) for one in inputs]
    try:
        with operations_always():
            pairs = [values(copy.deepcopy(one).bfloat16(), halves) for one in (stock, ours)]
        return max((_rms(b.double() - a.double()) for a, b in zip(*pairs, strict=True)), default=0.0)
    except FAILURES:
        return float("inf")


def values(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Tensors:
    with torch.no_grad():
        return _list(module(*inputs))


def gradients(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Tensors:
    """Of the inputs and of every weight."""
    leaves = [one.clone().requires_grad_() if one.is_floating_point() else one for one in inputs]
    generator = torch.Generator().manual_seed(2)
    with torch.enable_grad():
        outputs = _list(module(*leaves))
        loss = sum((one * torch.randn(one.shape, generator=generator).to(one.dtype)).sum() for one in outputs)
        wanted = [*(one for one in leaves if one.is_floating_point()), *module.parameters()]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)  # type: ignore[arg-type]
    return [torch.zeros(()) if one is None else one for one in found]


def _list(output: torch.Tensor | tuple[torch.Tensor, ...]) -> Tensors:
    return [output] if isinstance(output, torch.Tensor) else list(output)


def _cast(one: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return one.to(dtype) if one.is_floating_point() else one


def _other_dtypes(given: Tensors, expected: Tensors) -> str | None:
    pairs = zip(given, expected, strict=True)
    return next((f"are {a.dtype}, not {b.dtype}" for a, b in pairs if a.dtype != b.dtype), None)


def _rounds_worse(given: Tensors, expected: Tensors, truth: Tensors) -> str | None:
    for ours, theirs, exact in zip(given, expected, truth, strict=True):
        known = theirs.isfinite() & exact.isfinite()
        if not torch.equal(ours.isfinite() & exact.isfinite(), known):
            return "are not finite in other places"
        off, allowed = (_rms((one.double() - exact)[known]) for one in (ours, theirs))
        rounding = ONE_ROUNDING * torch.finfo(theirs.dtype).eps * _rms(exact[known].double())
        if off > TIMES_THEIRS * allowed + rounding * (LUCK if exact.numel() < FEW else 1.0):
            return f"are {off / max(allowed, 1e-30):.2f} times as far from float64's"
    return None


def _rms(tensor: torch.Tensor) -> float:
    return tensor.square().mean().sqrt().item() if tensor.numel() else 0.0
