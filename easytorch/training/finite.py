"""NaN and infinity: which tensor has the first of them, and the error that ends a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

_MOST_ROWS = 8  # that a message names


class NonFiniteError(ArithmeticError):
    """Training met a NaN or an infinity: at which step, and in which tensor.

    `step`: the optimizer step, counted from 1; `tensor`: the name of the first tensor that is not finite; `rows`: the
    numbers of the rows of the data in the micro-batches whose loss is not finite.
    """

    def __init__(self, step: int, tensor: str, advice: str, rows: Sequence[int] = ()) -> None:
        self.step, self.tensor, self.rows = step, tensor, list(rows)
        super().__init__(f"step {step}: {tensor}{_of_rows(self.rows)}; {advice}")


def _of_rows(rows: list[int]) -> str:
    if not rows:
        return ""
    more = f" and {len(rows) - _MOST_ROWS} more" if len(rows) > _MOST_ROWS else ""
    return f", of the row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:_MOST_ROWS]))}{more} of the data"


def first_nonfinite(
    model: torch.nn.Module, loss: float, norm: float, of_stages: Callable[[str | None], list[str | None]] | None = None
) -> str | None:
    """The first tensor, in causal order, that is not finite after a backward pass; None where all are.

    loss: over all processes. norm: of all gradients. A parameter comes before the loss it makes, the loss before its
    gradients, and of these the ones nearest to the loss. of_stages: the findings of all stages of a pipeline, in order,
    of this stage's; each of them calls this.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return None
    named = list(model.named_parameters())
    if (bad := nonfinite_parameter(model, of_stages)) is not None:
        return bad
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    gradients = [(name, parameter.grad) for name, parameter in reversed(named) if parameter.grad is not None]
    own = _first("the gradient of", gradients)
    found = next(filter(None, reversed(of_stages(own))), None) if of_stages else own
    return found or f"the norm of the gradients is {norm}, though each of them is finite"


def nonfinite_parameter(
    model: torch.nn.Module, of_stages: Callable[[str | None], list[str | None]] | None = None
) -> str | None:
    """The first parameter with a NaN or an infinity, in words; None where all are finite. of_stages: see above."""
    own = _first("the parameter", model.named_parameters())
    return next(filter(None, of_stages(own)), None) if of_stages else own


def _first(kind: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    for name, tensor in tensors:
        if (count := nonfinite_values(tensor.detach())) > 0:
            return f"{kind} {name} has {count} of {tensor.numel()} values that are not finite"
    return None


def nonfinite_values(tensor: torch.Tensor) -> int:
    """The number of values that are NaN or infinite; of a sharded tensor over all ranks, each of which calls this."""
    if not isinstance(tensor, DTensor):
        finite = torch.isfinite(tensor)
        return 0 if finite.all() else int((~finite).sum())
    own = (~torch.isfinite(tensor.to_local())).sum()
    placements = [one if isinstance(one, Replicate) else Partial() for one in tensor.placements]
    total = DTensor.from_local(own, tensor.device_mesh, placements, run_check=False)
    return int(total.full_tensor())
