"""A train step as one program: losses, weights and the optimizer's state are torch's, on one device and over meshes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import easytorch.frontend

pytest.importorskip("jax")
ROOT = Path(__file__).parents[2]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3)).train()


def squared(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model: torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
         {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2,
    ),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9)),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "SGD, momentum": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1
    ),
    "SGD, Nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_buffers_and_state_are_those_of_torch(name: str) -> None:
    """The schedule changes the rate, the norm is clipped, and a torch run continues from what was synced."""
    model = network()
    alone = copy.deepcopy(model)
    optimizer, eager = OPTIMIZERS[name](model), OPTIMIZERS[name](alone)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, eager)]
    backend = "torch" if name == "SGD" else "xla:cpu"
    step = easytorch.frontend.train_step(model, optimizer, loss=squared, max_grad_norm=0.05, backend=backend)
    batches = torch.randn(4, 5, 4)
    for number, x in enumerate(batches):
        if number == 3:  # the last step is eager in both
            step.sync()
            optimizer.zero_grad()
            found = squared(model(x))
            found.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        else:
            found = step(x)
        eager.zero_grad()
        wanted = squared(alone(x))
        wanted.backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        eager.step()
        torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)
        if number < 3:
            torch.testing.assert_close(step.grad_norm, norm, rtol=1e-5, atol=1e-6)
        for schedule in schedules:
            schedule.step()
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=2e-4, atol=2e-5)
    step.bind()
    torch.testing.assert_close(step.state_dict()["0.weight"], model.state_dict()["0.weight"])


def test_dropout_draws_anew_and_is_seeded() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)).train()
    step = easytorch.frontend.train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.0), loss=squared, backend="torch"
    )
    x = torch.randn(2, 4)
    losses = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        losses.append(float(step(x)))
    assert losses[0] == losses[2] != losses[1]


def test_what_is_computed_again_has_the_dropout_it_had() -> None:
    """Other masks in the backward gave gradients of another function."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0]
            return nn.functional.dropout(self.linear(heads), 0.3) + nn.functional.rrelu(x, training=True)

    weights = []
    for again in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Layer(), Layer()).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        step = easytorch.frontend.train_step(model, optimizer, loss=squared, backend="torch", recompute=again)
        step(torch.linspace(-1, 1, 40).view(5, 8))
        weights.append(torch.cat([one.flatten() for one in step.state_dict().values()]))
    torch.testing.assert_close(weights[0], weights[1])


def test_what_is_computed_again_has_the_buffers_it_had() -> None:
    """Read in the backward, a buffer was the one that the model had when the step was made."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("seen", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.linear(x * self.seen.clone()).tanh()
            self.seen += 0.5
            return found

    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Layer(), Layer()).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        step = easytorch.frontend.train_step(model, optimizer, loss=squared, backend="torch", recompute=again)
        for _ in range(3):
            step(torch.linspace(-1, 1, 40).view(5, 8))
        found.append(step.state_dict())
    torch.testing.assert_close(*found)
    torch.testing.assert_close(found[1]["0.seen"], torch.full((8,), 2.5))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_layers_of_unusual_forms(shared: bool, again: bool) -> None:
    """One that returns None beside its output, assigns to a buffer, and is there under two names, as in torch."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("seen", torch.ones(8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            found = self.linear(x * self.seen).tanh()
            self.seen = self.seen + found.mean(0)
            return found, None

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = Layer()
            self.layers = nn.ModuleList([first, first if shared else Layer()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x, _ = layer(x)
                layer.seen = layer.seen.detach()
            return x

    torch.manual_seed(0)
    model = Layers().train()
    alone = copy.deepcopy(model)
    optimizer, eager = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, alone))
    step = easytorch.frontend.train_step(model, optimizer, loss=squared, backend="torch", recompute=again)
    x = torch.linspace(-1, 1, 40).view(5, 8)
    for _ in range(3):
        eager.zero_grad()
        wanted = squared(alone(x))
        wanted.backward()
        eager.step()
        torch.testing.assert_close(step(x), wanted.detach())
    step.sync()
    torch.testing.assert_close(model.state_dict(), alone.state_dict())


@pytest.mark.parametrize("name", ["AdamW", "SGD, momentum"])
def test_parameters_without_a_gradient_are_left_as_they_are(name: str) -> None:
    """Weight decay too leaves them, as torch's optimizers do."""

    class First(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x)  # type: ignore[no-any-return]

    model = First(nn.Linear(4, 4), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = easytorch.frontend.train_step(model, OPTIMIZERS[name](model), loss=squared, backend="torch")
    for _ in range(2):
        step(torch.ones(2, 4))
    for key, value in step.state_dict().items():
        assert torch.equal(value, before[key]) is key.startswith("1."), key


def test_what_cannot_be_compiled_is_refused() -> None:
    model, other = network(), network()
    refusals: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (NotImplementedError, "not of Adagrad", torch.optim.Adagrad(model.parameters()), {}),
        (NotImplementedError, "amsgrad=True", torch.optim.Adam(model.parameters(), amsgrad=True), {}),
        (ValueError, "not the model's", torch.optim.SGD(other.parameters(), 0.1), {}),
        (ValueError, "no axis 'fdsp'", torch.optim.SGD(model.parameters(), 0.1), {"mesh": "fdsp=2"}),
        (NotImplementedError, "and the mesh has pp", torch.optim.SGD(model.parameters(), 0.1), {"mesh": "pp=2"}),
        (ValueError, "above 0, got -1", torch.optim.SGD(model.parameters(), 0.1), {"max_grad_norm": -1.0}),
        (ValueError, "above 0, got nan", torch.optim.SGD(model.parameters(), 0.1), {"max_grad_norm": float("nan")}),
        (ValueError, "uneven", torch.optim.SGD(model.parameters(), 0.1), {"mesh": "dp=1", "uneven": "pad"}),
    ]
    for kind, message, optimizer, settings in refusals:
        with pytest.raises(kind, match=message):
            easytorch.frontend.train_step(model, optimizer, backend="xla:cpu", **settings)
    step = easytorch.frontend.train_step(model, torch.optim.SGD(model.parameters(), 0.1), backend="torch")
    with pytest.raises(easytorch.frontend.LoweringError, match=r"one number, and it has the shape \(2, 3\)"):
        step(torch.randn(2, 4))


def test_batches_that_are_no_tensors_or_have_no_rows_are_refused() -> None:
    model = torch.nn.Linear(3, 2)
    train_step = easytorch.frontend.train_step
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="torch", loss=lambda y: y.sum())
    with pytest.raises(TypeError, match=r"\[0\]\[0\] of a batch is a numpy.ndarray: a train step takes tensors"):
        step(np.ones((4, 3), dtype=np.float32))
    with pytest.raises(ValueError, match=r"of a batch is empty, of the shape \(0, 3\)"):
        step(torch.ones(0, 3))


def test_meshes_of_four_devices_give_the_losses_of_one() -> None:
    """In a process of its own, which starts with four CPU devices; the whole table is scripts/check_train_step.py."""
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }  # fmt: skip
    program = (
        "from scripts.check_train_step import TOLERANCE, compare\n"
        "for model, mesh, again in (('dense', 'fsdp=2,tp=2', True), ('experts', 'fsdp=2,ep=2', False)):\n"
        "    worst = compare(model, mesh, 2, layers=1, recompute=again)\n"
        "    assert all(worst[key] <= bound for key, bound in TOLERANCE.items()), (model, mesh, worst)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
