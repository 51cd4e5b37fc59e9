"""Activation checkpointing changes what is kept, and no number; `compile` runs every layer compiled."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import easytorch
from easytorch.training import train
from easytorch.training.activations import checkpoint_activations
from easytorch.training.architecture import build
from easytorch.training.metrics import read_metrics, series


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[operator.name().partition(".")[0]] += 1
        return operator(*args, **(kwargs or {}))


def backward_of(settings, kind: str, every: int = 1) -> tuple[Counter[str], float, list[torch.Tensor]]:
    torch.manual_seed(0)
    config = settings(activation_checkpointing=kind, activation_checkpointing_every=every)
    model = easytorch.AutoModelForCausalLM.from_config(build({**config.model, "vocab_size": 64})).train()
    if kind != "none":
        checkpoint_activations(model, config)
    ids = torch.arange(60).view(2, 30)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with Operators() as seen:
        loss.backward()
    return seen.counts, float(loss.detach()), [parameter.grad for parameter in model.parameters()]


def test_what_is_computed_again(settings):
    """Of two layers of seven products: all of them, none of them, those of every second layer."""
    runs = {
        name: backward_of(settings, *given)
        for name, given in {
            "none": ("none",), "full": ("full",), "selective": ("selective",), "second": ("full", 2),
        }.items()
    }  # fmt: skip
    products = {name: counts["aten::mm"] for name, (counts, _, _) in runs.items()}
    extra = products["full"] - products["none"]
    assert extra >= 2 * 6 and products["selective"] == products["none"]
    assert products["second"] - products["none"] == extra / 2
    attentions = {
        name: sum(count for one, count in counts.items() if "attention" in one and "backward" not in one)
        for name, (counts, _, _) in runs.items()
    }
    assert attentions["full"] - attentions["none"] == 2 and attentions["selective"] == attentions["none"]
    for name in ("full", "selective", "second"):
        assert runs[name][1] == runs["none"][1]
        assert all(map(torch.equal, runs[name][2], runs["none"][2])), name


def test_a_run_has_the_same_losses(settings, monkeypatch):
    compiled = []
    original = torch.nn.Module.compile

    def compile_(self):  # not by inductor, which takes a compiler and a minute
        compiled.append(self)
        original(self, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    torch.compiler.reset()
    small = {"steps": 1, "eval_fraction": 0.0, "warmup_steps": 0, "block_size": 16}
    small["model"] = {**settings().model, "num_hidden_layers": 1}
    runs = {
        "plain": settings("plain", **small),
        "selective": settings("selective", **small, activation_checkpointing="selective"),
        "compiled": settings("compiled", **small, compile=True),
    }
    found = {}
    for name, config in runs.items():
        train(config)
        found[name] = [value for _, value in series(read_metrics(Path(config.output) / "metrics.jsonl"), "loss")]
    assert found["selective"] == found["plain"] and found["compiled"] == pytest.approx(found["plain"], rel=1e-5)
    assert len(compiled) == 1
    other = dataclasses.replace(runs["plain"], steps=2, resume=True, change=("steps",), activation_checkpointing="full")
    assert train(other).steps == 2


def test_what_cannot_be_is_refused(settings):
    with pytest.raises(ValueError, match=r"activation_checkpointing .* must be one of none, full, selective"):
        settings(activation_checkpointing="some")
    with pytest.raises(ValueError, match=r"activation_checkpointing_every .* must be at least 1"):
        settings(activation_checkpointing="full", activation_checkpointing_every=0)
