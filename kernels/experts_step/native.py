"""The experts that a router chose for some tokens, by the operations' definitions.

Legend: N tokens, k experts of each, D hidden size, E experts, I inner size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.decoder_step import native as step
from easytorch.kernels.decoder_step.native import AnyProjection, Projection
from easytorch.kernels.glu import native as glu

CLAMPED = "clamped"
UNITS = (*step.ACTIVATIONS, CLAMPED)


class Unit(NamedTuple):
    """What becomes of gate and up: activation(gate) * up of a name of decoder_step's `ACTIVATIONS`, the gate's columns
    before those of up; or "clamped", (up + 1) * gate * sigmoid(alpha * gate) of even and odd columns, the gate at most
    `limit` and up within -limit..limit (gpt-oss)."""

    name: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        if self.name == CLAMPED:
            gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
            return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        gate, up = gate_up.chunk(2, dim=-1)
        if self.name == "silu":
            return glu.swiglu(gate, up)
        return glu.geglu(gate, up, "tanh" if self.name == "gelu_tanh" else "none")


SILU = Unit()


def experts_step(
    x: Tensor, indices: Tensor, weights: Tensor, gate_up: AnyProjection, down: AnyProjection, unit: Unit = SILU
) -> Tensor:
    """The sum of weight * down(unit(gate_up(x))) over the k experts of each token, in float32, rounded once.

    x (N, D), indices (N, k) integers and weights (N, k) -> (N, D). gate_up, down: stacks of projections, their tensors
    with a first dimension E: weights (E, 2 * I, D) and (E, D, I). An index of E or more adds nothing.
    """
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert in range(experts_of(gate_up)):
        token, pick = torch.nonzero(indices == expert, as_tuple=True)
        rows = step.product(unit(step.product(x[token], part_of(gate_up, expert))), part_of(down, expert))
        total.index_add_(0, token, rows.to(total.dtype) * weights[token, pick, None].to(total.dtype))
    return total.to(x.dtype)


def experts_of(stack: AnyProjection) -> int:
    return (stack.weight if isinstance(stack, Projection) else stack.codes).shape[0]


def part_of(stack: AnyProjection, expert: int) -> AnyProjection:
    """The projection of one expert."""
    parts: dict[str, Any] = {name: x[expert] for name, x in stack._asdict().items() if isinstance(x, Tensor)}
    return stack._replace(**parts)
