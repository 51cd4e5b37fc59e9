"""Memory, model FLOPs and TensorBoard beside the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import easytorch
from easytorch.training import report, train
from easytorch.training.architecture import build
from easytorch.training.metrics import read_metrics
from easytorch.training.prepare import check_inputs
from easytorch.training.processes import Processes
from easytorch.training.usage import Usage, flops_per_token

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def model_of(**settings):
    return easytorch.AutoModelForCausalLM.from_config(build({**SIZES, "vocab_size": 50, **settings}))


def test_flops_are_those_of_the_products_and_of_attention():
    layer = 16 * (16 + 8 + 8 + 16) + 3 * 16 * 24
    attention = 12 * 2 * 16 * 32
    for tied in (False, True):  # an embedding is looked up; a head is multiplied by, tied or not
        model = model_of(model_type="llama", intermediate_size=24, tie_word_embeddings=tied)
        assert flops_per_token(model, 32) == 6 * (2 * layer + 50 * 16) + attention
    experts = model_of(
        model_type="qwen3_moe", moe_intermediate_size=8, num_experts=4, num_experts_per_tok=1, intermediate_size=24,
        tie_word_embeddings=False,
    )  # fmt: skip
    every = sum(one.numel() for name, one in experts.named_parameters() if ".experts." in name)
    rest = sum(
        one.numel() for name, one in experts.named_parameters()
        if one.dim() > 1 and ".experts." not in name and "embed_tokens" not in name
    )  # fmt: skip
    assert flops_per_token(experts, 32) == 6 * (rest + every / 4) + attention


def test_mfu_is_of_known_devices_alone(settings, monkeypatch):
    model, config = model_of(model_type="llama", intermediate_size=24), settings(dtype="bfloat16")
    usage = Usage(model, config, Processes(0, 2, torch.device("cpu")))
    assert set(found := usage.figures(10.0)) == {"memory"} and found["memory"] > 1 << 20
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    on_gpu = Usage(model, config, Processes(0, 2, torch.device("cuda", 0)))
    rate = 2 * 989e12 / flops_per_token(model, config.block_size) / 4
    assert on_gpu.figures(rate) == {"memory": 3 << 30, "mfu": pytest.approx(0.25)}
    assert on_gpu.words(on_gpu.figures(rate)) == "  MFU 25.0%  3.22 GB"


def test_tensorboard_is_asked_for_by_name(settings, monkeypatch):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tensorboard .* needs the package tensorboard: pip install tensorboard"):
        check_inputs(settings(tensorboard=True), 1)


def test_tensorboard_has_the_metrics(settings):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = settings(steps=2, eval_fraction=0.0, tensorboard=True)
    train(config)
    events = EventAccumulator(str(Path(config.output) / "tensorboard")).Reload()
    lines = read_metrics(Path(config.output) / "metrics.jsonl")
    assert [one.value for one in events.Scalars("loss")] == pytest.approx([line["loss"] for line in lines], rel=1e-6)
