"""A loss, a gradient or a weight that is NaN or infinite: the run stops or skips, and keeps its good checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from easytorch.training import NonFiniteError, latest_checkpoint, train
from easytorch.training.finite import first_nonfinite, nonfinite_parameter
from easytorch.training.loop import MOST_SKIPPED_IN_A_ROW, _Run
from easytorch.training.metrics import read_metrics
from easytorch.training.processes import Processes
from easytorch.training.task import TextTask


def strict_lines(output):
    """The metrics, by a reader that refuses what JSON does not have."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (Path(output) / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def names(output):
    return sorted(path.name for path in Path(output).glob("checkpoint-*"))


def multiplied(monkeypatch, factor, *steps):
    """The loss of these steps is multiplied by `factor`, and with it every gradient."""
    original = _Run._loss

    def loss(self, module, tokens):
        value = original(self, module, tokens)
        return value * factor if module.training and self.step + 1 in steps else value

    monkeypatch.setattr(_Run, "_loss", loss)


@pytest.mark.parametrize(("factor", "said"), [(math.nan, "the loss is nan"), (math.inf, "the loss is inf")])
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_checkpoints(settings, monkeypatch, factor, said):
    multiplied(monkeypatch, factor, 7)
    config = settings(save_every=2, keep_checkpoints=1)
    with pytest.raises(
        NonFiniteError, match=rf"step 7: {said}, of the rows .*checkpoint-6 is the last good checkpoint"
    ) as caught:
        train(config)
    assert caught.value.step == 7 and caught.value.tensor == said
    assert names(config.output) == ["checkpoint-6"]
    lines = strict_lines(config.output)
    assert lines[-1]["step"] == 7 and lines[-1]["loss"] is None and lines[-1]["stopped"] == said


def test_the_rows_of_a_loss_that_is_not_finite_are_named(settings, monkeypatch):
    bad = {}
    rows, loss = TextTask.rows, _Run._loss

    def seen(self, indices):
        bad["now"] = list(indices)
        return rows(self, indices)

    def of_one(self, module, batch):
        value = loss(self, module, batch)
        if not module.training or self.step != 1:
            return value
        bad.setdefault("rows", bad["now"])  # of the first micro-batch
        return value * math.nan if bad["now"] == bad["rows"] else value

    monkeypatch.setattr(TextTask, "rows", seen)
    monkeypatch.setattr(_Run, "_loss", of_one)
    config = settings(micro_batch_size=1)
    with pytest.raises(
        NonFiniteError, match=r"step 2: the loss is nan, of the row \d+ of the data; no check"
    ) as caught:
        train(config)
    assert caught.value.rows == bad["rows"] == strict_lines(config.output)[-1]["rows"]


def test_a_gradient_that_is_not_finite_is_named(settings, monkeypatch):
    original = _Run._loss

    def loss(self, module, tokens):
        weight = self.model.get_parameter("model.layers.1.mlp.up_proj.weight")
        if module.training and self.step == 2:
            weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), torch.nan))
        return original(self, module, tokens)

    monkeypatch.setattr(_Run, "_loss", loss)
    said = r"step 3: the gradient of model\.layers\.1\.mlp\.up_proj\.weight has 32 of 2048 values .*no checkpoint"
    with pytest.raises(NonFiniteError, match=said):
        train(settings())
    assert latest_checkpoint(settings().output) is None


def test_skipped_steps_change_nothing(settings, monkeypatch):
    config = settings(on_nonfinite="skip", steps=4, eval_fraction=0.0, schedule="constant", warmup_steps=0)
    multiplied(monkeypatch, math.nan, 3, 4)
    result = train(config)
    assert (result.steps, result.skipped) == (4, 2)
    lines = strict_lines(config.output)
    assert [line.get("loss") is None for line in lines] == [False, False, True, True]
    assert [line.get("skipped") for line in lines][2:] == ["the loss is nan"] * 2
    monkeypatch.undo()
    two = dataclasses.replace(config, output=config.output + "-two", steps=2, on_nonfinite="stop")
    expected = torch.load(train(two).checkpoint / "training_state.pt")["optimizer"]["state"]
    got = torch.load(result.checkpoint / "training_state.pt")["optimizer"]["state"]
    for number, moments in expected.items():
        assert all(torch.equal(got[number][name], moments[name]) for name in moments)


def test_a_run_of_skipped_steps_alone_has_no_curve(settings, monkeypatch):
    multiplied(monkeypatch, math.nan, 1, 2)
    result = train(settings(on_nonfinite="skip", steps=2, eval_fraction=0.0))
    assert result.skipped == 2 and result.checkpoint.is_dir()
    assert not (result.checkpoint.parent / "loss.png").exists()


def test_a_run_that_only_skips_is_stopped(settings, monkeypatch):
    config = settings(on_nonfinite="skip", steps=40, eval_fraction=0.0)
    multiplied(monkeypatch, math.nan, *range(5, 41))
    with pytest.raises(NonFiniteError, match=f"the {MOST_SKIPPED_IN_A_ROW + 1}th step in a row"):
        train(config)
    assert len(strict_lines(config.output)) == 4 + MOST_SKIPPED_IN_A_ROW + 1


def test_skips_are_counted_in_a_row(settings, monkeypatch):
    steps = [step for step in range(1, 31) if step % (MOST_SKIPPED_IN_A_ROW + 1)]
    multiplied(monkeypatch, math.nan, *steps)
    result = train(settings(on_nonfinite="skip", steps=30, eval_fraction=0.0))
    assert (result.steps, result.skipped) == (30, len(steps))


def test_weights_that_give_no_finite_loss_replace_no_checkpoint(settings, monkeypatch):
    """The loss of a step is that of the weights before it; weights that the last step has driven off are seen too."""
    config = settings(save_every=2, keep_checkpoints=1, eval_fraction=0.0)
    original = torch.optim.AdamW.step

    def step(self, *arguments):
        original(self, *arguments)
        taken = next(iter(self.state.values()))["step"]
        if taken == 6:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(1e30)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(
        NonFiniteError,
        match=r"step 6: the norm of the gradients is .* with the weights after .*checkpoint-4 is the last good",
    ):
        train(config)
    assert names(config.output) == ["checkpoint-4"]


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_a_weight_that_is_not_finite_is_named_and_never_skipped(settings, monkeypatch, mode):
    config = settings(save_every=2, keep_checkpoints=1, eval_fraction=0.0, on_nonfinite=mode)
    original = torch.optim.AdamW.step

    def step(self, *arguments):
        original(self, *arguments)
        if next(iter(self.state.values()))["step"] == 5:
            self.param_groups[0]["params"][0].data[0, 0] = math.inf

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(NonFiniteError, match=r"step 6: the parameter model\.embed_tokens\.weight has 1 of"):
        train(config)
    assert names(config.output) == ["checkpoint-4"]


def test_a_weight_that_is_not_finite_in_another_process_ends_this_one_too(settings, monkeypatch):
    """Every process decides by the answers of all: one that went on by itself would wait for the others for ever."""
    monkeypatch.setattr(Processes, "any", lambda self, found: True)
    config = settings(steps=2, eval_fraction=0.0, save_every=0)
    with pytest.raises(NonFiniteError, match="step 2: a parameter is not finite in another process"):
        train(config)
    multiplied(monkeypatch, math.nan, 1)
    config = settings("skip", steps=2, eval_fraction=0.0, on_nonfinite="skip")
    with pytest.raises(NonFiniteError, match="step 1: the loss is nan"):
        train(config)


def test_a_held_out_loss_that_is_not_finite_ends_the_run(settings, monkeypatch):
    original = _Run._loss

    def loss(self, module, tokens):
        value = original(self, module, tokens)
        return value if torch.is_grad_enabled() or self.step != 5 else value * math.nan

    monkeypatch.setattr(_Run, "_loss", loss)
    config = settings(save_every=4)
    with pytest.raises(NonFiniteError, match="step 5: the held-out loss is nan"):
        train(config)
    assert names(config.output) == ["checkpoint-4"]
    assert strict_lines(config.output)[-1] == {"step": 5, "eval_loss": None}
    assert read_metrics(Path(config.output) / "metrics.jsonl")


def test_the_order_of_causes():
    """A weight before the loss, the loss before the gradients, of these the nearest to the loss; the norm last."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert first_nonfinite(model, 1.0, 1.0) is None
    assert first_nonfinite(model, 1.0, math.inf) == "the norm of the gradients is inf, though each of them is finite"
    model[0].weight.grad[0, 0] = math.nan
    assert first_nonfinite(model, 1.0, math.nan) == "the gradient of 0.weight has 1 of 4 values that are not finite"
    model[1].weight.grad[:] = -math.inf
    assert first_nonfinite(model, 1.0, math.nan) == "the gradient of 1.weight has 4 of 4 values that are not finite"
    assert first_nonfinite(model, math.nan, math.nan) == "the loss is nan"
    assert nonfinite_parameter(model) is None
    model[1].bias.data[1] = math.nan
    assert nonfinite_parameter(model) == "the parameter 1.bias has 1 of 2 values that are not finite"
    assert first_nonfinite(model, math.nan, math.nan) == nonfinite_parameter(model)
