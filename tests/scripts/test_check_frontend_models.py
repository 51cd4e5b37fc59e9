"""What scripts/check_frontend_models.py counts as equal: rounding, which float64 tells from an error."""

from __future__ import annotations

import pytest
import torch

from scripts.check_frontend_models import TOLERANCE, compared


class Amplifier(torch.nn.Module):
    """The logistic map, in whose steps a difference doubles."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.start = torch.nn.Parameter(torch.linspace(0.1, 0.4, 16))
        self.steps = steps

    def forward(self, other_order: bool = False, error: float = 0.0) -> torch.Tensor:
        x = self.start + error
        for _ in range(self.steps):
            x = 4 * (x - x * x) if other_order else 4 * x * (1 - x)
        return x


@pytest.mark.parametrize(
    ("steps", "error", "status"),
    [(2, 0.0, "equal"), (14, 0.0, "equal"), (14, 1e-5, "different"), (2, 1e-3, "different")],
)
def test_only_rounding_is_equal(steps: int, error: float, status: str) -> None:
    model = Amplifier(steps)
    with torch.no_grad():
        result = compared(model, lambda: model(other_order=True, error=error), model, "equal")
    assert result["status"] == status
    assert (result["off"] > TOLERANCE) == (steps > 2 or error > 0)
    assert model.start.dtype == torch.float32
