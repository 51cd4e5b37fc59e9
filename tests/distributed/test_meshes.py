"""Models over meshes of four processes (`mesh_rank.py`), and training there: as one process, and from mesh to mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import easytorch
from easytorch.training import TrainingConfig, train
from easytorch.training.checkpoint import load_state
from easytorch.training.gradients import clip, total_norm
from easytorch.training.metrics import read_metrics
from tests.processes import run_ranks

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
DENSE = {"model_type": "qwen3", "head_dim": 8, "intermediate_size": 48, "tie_word_embeddings": True, **SIZES}
EXPERTS = {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, **SIZES}
TEXT = "the class statement binds a name to an object and the function returns its value"
TOLERANCES = {"loss": 1e-5, "eval_loss": 1e-5, "gradient_norm": 1e-4}


def run_of(tmp_path: Path, name: str, model: dict[str, Any], **changes: Any) -> TrainingConfig:
    text = tmp_path / "text.txt"
    words = TEXT.split()
    text.write_text("\n".join(" ".join(words[(i * 7 + j * j) % len(words)] for j in range(9)) for i in range(200)))
    values: dict[str, Any] = {
        "text": (str(text),), "output": str(tmp_path / name), "model": model, "vocab_size": 300, "block_size": 16,
        "batch_size": 8, "micro_batch_size": 1, "steps": 4, "learning_rate": 5e-3, "warmup_steps": 1, "grad_clip": 0.5,
        "eval_every": 2, "eval_fraction": 0.02, "save_every": 2, "device": "cpu",
    }  # fmt: skip
    return TrainingConfig(**{**values, **changes})


def test_four_processes_compute_and_train_as_one_does(tmp_path: Path) -> None:
    alone = {"dense": run_of(tmp_path, "dense", DENSE), "experts": run_of(tmp_path, "experts", EXPERTS)}
    meshes = {"a": ("dense", "fsdp=2,tp=2"), "b": ("experts", "fsdp=-1,tp=2"), "c": ("experts", "pp=2,ep=2")}
    runs = {
        name: dataclasses.replace(alone[kind], output=str(tmp_path / name), mesh=mesh)
        for name, (kind, mesh) in meshes.items()
    }
    runs["a"] = dataclasses.replace(runs["a"], checkpoint_format="full")
    runs["b"] = dataclasses.replace(runs["b"], async_checkpoint=True)
    # stopped on one mesh and gone on with on another, by sharded checkpoints and full ones, onto stages and from them
    first = dataclasses.replace(runs["b"], output=str(tmp_path / "again"), steps=2, mesh="fsdp=2,ep=2")
    chain = [dataclasses.replace(first, schedule="constant", eval_every=1)]
    for mesh, kind in (("pp=2,ep=2", "full"), ("fsdp=2,pp=2", "auto"), ("sp=2,tp=-1", "auto")):
        before = chain[-1]
        chain.append(
            dataclasses.replace(
                before, steps=before.steps + 1, mesh=mesh, resume=True, change=("steps", "mesh"),
                checkpoint_format=kind, async_checkpoint=False,
            )
        )  # fmt: skip
    further = chain[-1]
    written = []
    for number, config in enumerate((*runs.values(), *chain)):
        written.append(tmp_path / f"{number}.json")
        config.save(written[-1])
    done = run_ranks(Path(__file__).with_name("mesh_rank.py"), *written, processes=4, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count(" ok\n") == 4, done.stdout
    for config in alone.values():
        train(config)
    for name, (kind, _) in meshes.items():
        same_curves(runs[name], alone[kind])
        same_checkpoints(runs[name], alone[kind])
    short = dataclasses.replace(chain[0], output=str(tmp_path / "short"), mesh=None, steps=5)
    train(short)
    same_curves(further, short)
    # from shards of four processes to one, which has read the weights and moments of all
    last = dataclasses.replace(further, steps=6, mesh=None, change=("steps", "mesh", "processes"))
    train(last)
    train(dataclasses.replace(short, steps=6, resume=True, change=("steps",)))
    same_curves(last, short)


def same_curves(config: TrainingConfig, expected: TrainingConfig) -> None:
    found, wanted = (read_metrics(Path(one.output) / "metrics.jsonl") for one in (config, expected))
    for key, tolerance in TOLERANCES.items():
        series = [[line[key] for line in lines if key in line] for lines in (found, wanted)]
        assert len(series[1]) >= 2 and series[0] == pytest.approx(series[1], rel=tolerance), (config.mesh, key)


def same_checkpoints(config: TrainingConfig, expected: TrainingConfig) -> None:
    """Files, names, shapes and settings as one process writes them, moments too; values to rounding."""
    last, wanted = (Path(one.output) / "checkpoint-4" for one in (config, expected))
    if config.checkpoint_format == "auto":
        assert [path.name for path in sorted(last.glob("*.safetensors"))] == [
            f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in range(1, 5)
        ]
        weights = easytorch.AutoModelForCausalLM.from_pretrained(Path(config.output) / "model").state_dict()
        for name, tensor in easytorch.AutoModelForCausalLM.from_pretrained(wanted).state_dict().items():
            assert float((weights[name] - tensor).norm() / tensor.norm()) < 1e-3, (config.mesh, name)
        return
    assert {path.name for path in last.iterdir()} == {path.name for path in wanted.iterdir()}
    assert (last / "config.json").read_text() == (wanted / "config.json").read_text()
    weights = [load_file(folder / "model.safetensors") for folder in (last, wanted)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[1].items():
        assert float((weights[0][name] - tensor).norm() / tensor.norm()) < 1e-3, (config.mesh, name)
    states = [load_state(folder)["optimizer"] for folder in (last, wanted)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for number, own in states[1]["state"].items():
        for name, moment in own.items():
            other = states[0]["state"][number][name]
            assert other.shape == moment.shape, (config.mesh, number, name)
            assert float((other - moment).norm()) <= 1e-3 * float(moment.norm()), (config.mesh, number, name)


def test_meshes_that_cannot_train_are_refused(tmp_path: Path) -> None:
    for mesh, processes, message in (
        ("tp=3", 4, r"mesh \(--mesh\): the mesh tp=3 needs 3 devices, and there are 4"),
        ("sp=3", 3, r"block_size .* 16 does not divide over the 3 processes of sp"),
        ("fsdp=3,tp=2", 6, "batch_size .* 8 does not divide over 3 processes that have data of their own"),
        ("", 1, "must be a name"),
    ):
        with pytest.raises(ValueError, match=message):
            run_of(tmp_path, "refused", DENSE, mesh=mesh).share(processes)
    with pytest.raises(ValueError, match="pp and sp do not go together"):
        run_of(tmp_path, "stages", DENSE, mesh="pp=2,sp=2").share(4)
    assert run_of(tmp_path, "tp", DENSE, mesh="tp=-1").share(16) == (8, 1)


def test_norm_and_clipping_of_plain_gradients() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    norm = total_norm(one.grad for one in parameters)
    assert float(norm) == pytest.approx((27 + 64) ** 0.5)
    clip(parameters, 1.0, norm)
    assert float(total_norm(one.grad for one in parameters)) == pytest.approx(1.0, rel=1e-5)
    assert float(total_norm([])) == 0.0
