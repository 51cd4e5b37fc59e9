"""`easytorch plan`: what is counted, the extrapolation from few layers, and its errors."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("jax")

from easytorch.backends.xla.aot import Facts
from easytorch.cli.main import main
from easytorch.plan import estimate, make_plan
from easytorch.plan.compiled import tpu_slice
from easytorch.plan.devices import DEVICES
from easytorch.plan.estimate import _on_meta
from easytorch.plan.shapes import SHAPES, config_of

TINY: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
DENSE, EXPERTS = 1_000, 10_000
ROOT = Path(__file__).parents[2]


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Replaces the compiler: each layer takes `DENSE` or `EXPERTS` bytes beside what is counted."""
    seen: list[list[int]] = []

    def compile_step(model: Any, optimizer: Any, layout: Any, batch: Any, devices: Any, **settings: Any) -> Facts:
        experts = sum("experts" in dict(layer.mlp.named_children()) for layer in model.model.layers)
        dense = len(model.model.layers) - experts
        seen.append([dense, experts])
        parts = layout.axes.get("fsdp", 1) * layout.axes.get("tp", 1)
        counted = sum(one.numel() for one in model.parameters()) * 16 // parts
        memory = counted + 500 + dense * DENSE + experts * EXPERTS
        return Facts(memory, 0, 0, 0, 7.0 * dense + 11.0 * experts, {"all-gather": (dense + experts, 100 * dense)})

    monkeypatch.setattr("easytorch.plan.estimate.compile_step", compile_step)
    monkeypatch.setattr("easytorch.plan.estimate.compiler_devices", lambda count, *_: ("none", [None] * count))
    return seen


def test_layers_of_each_kind_are_extrapolated(linear: list[list[int]]) -> None:
    plan = make_plan(config_of(TINY), "fsdp=2", "v5e", precision="fp32")
    assert linear == [[1, 2], [2, 2], [1, 3]]
    assert plan.flops == 7 * 2 + 11 * 4
    assert plan.collectives == {"all-gather": (6, 200)}
    assert plan.parameters == plan.gradients == plan.parameter_count * 4 // 2 == plan.optimizer // 2
    assert plan.activations == 500 + 2 * DENSE + 4 * EXPERTS
    assert plan.fits and plan.memory == plan.parameters * 4 + plan.activations


def test_a_shallow_program_that_takes_more_than_a_deeper_one_is_left_out(
    linear: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a line through it more layers took less, and a model of many no activations at all."""
    compile_step = estimate.compile_step

    def uneven(model: Any, *args: Any, **settings: Any) -> Facts:
        facts = compile_step(model, *args, **settings)
        return dataclasses.replace(facts, temporary=10**6 if len(model.model.layers) == 3 else 0)

    monkeypatch.setattr(estimate, "compile_step", uneven)
    plan = make_plan(config_of(TINY), "fsdp=2", "v5e", precision="fp32")
    assert linear == [[1, 2], [2, 2], [1, 3], [2, 3], [1, 4]]
    assert plan.activations == 500 + 2 * DENSE + 4 * EXPERTS and plan.compiled_layers == [4, 5, 5]


def test_layers_that_never_take_more_count_as_nothing(monkeypatch: pytest.MonkeyPatch, linear: list[list[int]]) -> None:
    def shrinking(model: Any, *args: Any, **settings: Any) -> Facts:
        return Facts(10**9 - 10**6 * len(model.model.layers), 0, 0, 0, 0.0, {})

    monkeypatch.setattr(estimate, "compile_step", shrinking)
    assert make_plan(config_of(TINY), "fsdp=2", "v5e", precision="fp32").activations > 9 * 10**8


def test_a_stage_has_its_layers_and_the_micro_batches_in_flight(linear: list[list[int]]) -> None:
    config = config_of({**TINY, "first_k_dense_replace": 0})
    whole, staged = (make_plan(config, mesh, "v5e", precision="fp32") for mesh in ("dp=1", "pp=2"))
    assert staged.devices == 2 and staged.tokens == 2 * whole.tokens
    assert staged.activations == 500 + 2 * 3 * EXPERTS  # two micro-batches of half the layers
    assert staged.flops == whole.flops  # two micro-batches, half the layers
    assert 0.4 < staged.parameters / whole.parameters < 0.6


def test_layers_that_do_not_divide_are_counted_of_the_largest_stage(linear: list[list[int]]) -> None:
    """Three layers in two stages are two and one: the plan was of one and a half."""
    config = config_of({**TINY, "first_k_dense_replace": 0, "num_hidden_layers": 3})
    uneven, even = (make_plan(config_, "pp=2", "v5e", precision="fp32") for config_ in (
        config, config_of({**TINY, "first_k_dense_replace": 0, "num_hidden_layers": 4})
    ))  # fmt: skip
    assert (uneven.parameters, uneven.activations, uneven.flops) == (even.parameters, even.activations, even.flops)


def test_the_largest_stage_of_layers_of_two_kinds(linear: list[list[int]]) -> None:
    """Its own layers, and the embedding or the head: the plan was of an average of all layers."""
    found = make_plan(config_of({**TINY, "num_hidden_layers": 4}), "pp=2", "v5e", precision="fp32")
    weights = {"dense": 0, "experts": 0}
    for name, one in _on_meta(config_of({**TINY, "num_hidden_layers": 4}), torch.float32).named_parameters():
        first = "embed_tokens" in name or any(f"layers.{place}." in name for place in (0, 1))
        weights["dense" if first else "experts"] += one.numel() * 4
    assert weights["dense"] < weights["experts"] == found.parameters == found.optimizer // 2
    assert found.flops == 2 * (7 + 11 * 2) - 2 * 7 and found.activations == 500 + 2 * 2 * EXPERTS


def test_a_step_is_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By jaxlib for one CPU, from a file as users give it: a layer of experts, whose router has a buffer."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({**TINY, "num_hidden_layers": 1, "first_k_dense_replace": 0}))
    given = [str(path), "--mesh", "dp=1", "--device", "v5p", "--compiler", "cpu", "--sequence-length", "8", "--json"]
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *given])
    captured = capsys.readouterr()
    assert exit_.value.code == 0, captured.err
    found = json.loads(captured.out)
    assert found["fits"] and found["compiled_layers"] == [1] and found["flops"] > 0 and found["activations"] > 0


@pytest.mark.parametrize(
    ("mesh", "device", "settings", "message"),
    [
        ("fsdp=2", "v7", {}, r"unknown device 'v7'.*known: v4, v5e"),
        ("fdsp=2", "v5e", {}, "no axis 'fdsp'"),
        ("fsdp=-1", "v5e", {}, "give every size"),
        ("tp=3", "v5e", {}, "does not divide over"),
        ("pp=7", "v5e", {}, "6 layers do not make pp=7 stages"),
        ("dp=2", "v5e", {"micro_batches": 0}, "micro_batches must be an integer of at least 1, got 0"),
        ("dp=2", "v5e", {"batch_size": -2}, "batch_size must be an integer of at least 1, got -2"),
        ("dp=2", "v5e", {"batch_size": 3}, "batch size 3 does not divide"),
        ("dp=2", "v5e", {"optimizer": "lion"}, "known: adamw, sgd, momentum"),
        ("dp=2", "v5e", {"precision": "fp8"}, "known: mixed, bf16, fp32"),
        ("dp=2", "v5e", {"compiler": "nvcc"}, "known: auto, libtpu, cpu"),
    ],
)
def test_what_cannot_be_planned_is_refused(mesh: str, device: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(config_of(TINY), mesh, device, **settings)


def test_models_that_cannot_be_divided_or_made_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """As `shard_model` refuses them; and a slip of the pen, whose layers would be made for hours."""
    tied = {**TINY, "model_type": "llama", "tie_word_embeddings": True}
    for settings, mesh, message in (
        (tied, "pp=2", "one tied weight"),
        (TINY, "pp=2,sp=2", "pp and sp do not go together"),
        (tied, "ep=2", "declares no expert parallel plan"),
        (tied, "tp=8", "num_attention_heads=4 does not divide over 8 ranks"),
        ({**tied, "model_type": "gpt2"}, "tp=2", "declares no tensor parallel plan"),
        ({**tied, "model_type": "bert"}, "dp=2", "sees the tokens that it is to predict"),
        ({**tied, "hidden_size": -1}, "dp=2", "transformers cannot build 'llama' from these settings"),
        ({**tied, "hidden_act": "relux"}, "dp=2", "'llama' cannot be made from this config"),
        ({**TINY, "num_hidden_layers": 10**9}, "dp=2", "1 to 10,000 layers, and the config has 1,000,000,000"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(["plan", json.dumps(settings), "--mesh", mesh, "--device", "v5e"])
        said = capsys.readouterr().err
        assert exit_.value.code == 2 and message in said and said.count("\n") == 1, said


def test_known_models_have_the_parameters_they_are_named_after() -> None:
    billions = {"Meta-Llama-3-8B": 8.03, "Meta-Llama-3-70B": 70.55, "Qwen3-235B-A22B": 235.09, "DeepSeek-V3": 671.03}
    for name in SHAPES:
        count = sum(one.numel() for one in _on_meta(config_of(name), torch.bfloat16).parameters())
        assert round(count / 1e9, 2) == billions[name.partition("/")[2]], (name, count)


def test_slices_have_the_chips_that_are_asked_for() -> None:
    for count in (1, 8, 16, 64, 256, 512, 2048):
        shape = tpu_slice(count)
        assert shape is not None
        x, y, z = map(int, shape.split("x"))
        assert x * y * z == max(count, 4)
    assert tpu_slice(24) is None or tpu_slice(24) == "2x2x6"
    assert [tpu_slice(count, "v6e") for count in (1, 8, 24, 256, 512)] == ["2x2", "2x4", "4x8", "16x16", None]
    assert all(device.usable < device.memory for device in DEVICES.values())


def test_gradients_of_experts_stay_with_their_devices() -> None:
    """Stored over ep and fsdp: told nothing of the first, XLA brought the gradients of all experts to each device."""
    config = {**TINY, "num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 8}
    script = (
        "import re, sys\n"
        "from easytorch.backends.xla import aot\n"
        "from easytorch.plan import make_plan\n"
        "from easytorch.plan.shapes import config_of\n"
        "count = aot.count_collectives\n"
        "texts = []\n"
        "aot.count_collectives = lambda text: (texts.append(text), count(text))[1]\n"
        f"make_plan(config_of({config}), 'fsdp=2,ep=2', 'v5p', sequence_length=8, compiler='cpu')\n"
        "gathers = re.findall(r'= f32\\[([\\d,]+)\\]\\S* all-gather', texts[0])\n"
        "assert '4,32,32' in gathers, gathers  # the experts of a place of ep, from those that share it\n"
        "whole = [one for one in gathers if one in ('8,32,32', '8,16,32', '8,32,16')]\n"
        "assert not whole, gathers\n"
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env={**os.environ, **flags}, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
