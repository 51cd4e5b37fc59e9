from __future__ import annotations

import pytest
import torch

from easytorch.training.optim import learning_rate
from easytorch.training.optimizers import make_optimizer


def test_matrices_decay_and_vectors_do_not(settings):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Embedding(5, 3))
    optimizer = make_optimizer(model, settings(weight_decay=0.3))
    decay = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert len(decay) == 5
    assert {name: decay[parameter] for name, parameter in model.named_parameters()} == {
        "0.weight": 0.3, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.3,
    }  # fmt: skip


@pytest.mark.parametrize(("schedule", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_the_rate_warms_up_and_comes_down(settings, schedule, middle):
    config = settings(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=10, steps=110, schedule=schedule)
    assert [learning_rate(step, config) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert learning_rate(60, config) == pytest.approx(middle)
    rates = [learning_rate(step, config) for step in range(10, 110)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1, abs=0.01)


def test_no_warm_up_starts_at_the_peak(settings):
    assert learning_rate(0, settings(learning_rate=0.5, warmup_steps=0)) == 0.5


def test_the_rate_of_wsd_is_stable_and_then_falls_as_a_square_root(settings):
    config = settings(steps=100, warmup_steps=10, schedule="wsd", learning_rate=1.0, min_learning_rate=0.2)
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[9:91] == [1.0] * 82
    assert rates[91:] == pytest.approx([0.2 + 0.8 * (1 - (done / 10) ** 0.5) for done in range(1, 10)])
    longer = settings(steps=100, warmup_steps=10, schedule="wsd", learning_rate=1.0, decay_steps=90)
    assert learning_rate(55, longer) == pytest.approx(1 - 0.5**0.5)
    with pytest.raises(ValueError, match="at most the 90 steps after the warm-up"):
        settings(steps=100, warmup_steps=10, schedule="wsd", decay_steps=91)
