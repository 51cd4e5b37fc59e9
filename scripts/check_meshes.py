"""Train small models over meshes of 2 and 4 processes and compare each with one process, step by step.

    scripts/check_meshes.py [--steps 50] [--models dense experts] [--meshes fsdp=2 fsdp=2,tp=2 ...]

Same seed and data: losses to 1e-5 of one process's over all steps, in float32, gradient norms to 1e-4, and of each
parameter the gradient of the first step to 1e-5 of its norm. Prints a line for each mesh, and exits with 1 where one
differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from easytorch.distributed.mesh import parse_axes  # noqa: E402
from easytorch.distributed.shards import load_shards, saved_tensors  # noqa: E402
from easytorch.training import TrainingConfig, train  # noqa: E402
from easytorch.training.loop import train_among  # noqa: E402
from easytorch.training.metrics import read_metrics  # noqa: E402
from easytorch.training.processes import joined  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "intermediate_size": 96, "tie_word_embeddings": True, **SIZES},
    "qk-norms": {"model_type": "qwen3", "head_dim": 8, "intermediate_size": 96, **SIZES},
    "experts": {
        "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, **SIZES,
    },
    "latent": {
        "model_type": "deepseek_v3", "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 24,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, **SIZES,
        "num_key_value_heads": 8,
    },
}  # fmt: skip
MESHES = (
    "dp=2", "fsdp=2", "tp=2", "sp=2", "dp=4", "fsdp=4", "dp=2,fsdp=2", "dp=2,tp=2", "fsdp=2,tp=2", "tp=4",
    "sp=4", "dp=2,sp=2", "fsdp=2,sp=2", "sp=2,tp=2",
)  # fmt: skip
STAGES = ("pp=2", "dp=2,pp=2", "fsdp=2,pp=2", "pp=2,tp=2")
OF_EXPERTS = ("ep=2", "ep=4", "dp=2,ep=2", "fsdp=2,ep=2", "ep=2,tp=2", "pp=2,ep=2")
MESHES_OF = {  # tied weights are in one stage
    "dense": MESHES, "qk-norms": (*MESHES, *STAGES), "experts": (*MESHES, *OF_EXPERTS, *STAGES), "latent": OF_EXPERTS,
}  # fmt: skip
FIRST = "-first"  # ends the name of the output of a run of one step
TOLERANCE = {"loss": 1e-5, "gradient_norm": 1e-4, "gradients": 1e-5}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--meshes", nargs="+", help="for each of the models; by default those it can be trained over")
    parser.add_argument("--train", nargs="+", metavar="FILE", help="what a process that torchrun started trains")
    given = parser.parse_args()
    if given.train:
        return _train_here(given.train)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
        alone = {model: _config(Path(folder) / model, text, model, given.steps) for model in given.models}
        for config in alone.values():
            train(config)
            train(_first_step(config))
        # one start of the processes for all models and meshes of as many
        by_processes: dict[int, list[tuple[str, str, TrainingConfig]]] = {}
        for model in given.models:
            for mesh in given.meshes or MESHES_OF[model]:
                processes = math.prod(int(size.partition("=")[2]) for size in mesh.split(","))
                assert parse_axes(mesh, processes)
                config = _config(Path(folder) / f"{model}-{mesh}", text, model, given.steps, mesh)
                by_processes.setdefault(processes, []).append((model, mesh, config))
        for processes, runs in by_processes.items():
            _train_over([config for _, _, config in runs], processes)
            for model, mesh, config in runs:
                output, expected = Path(config.output), Path(alone[model].output)
                worst = {key: _difference(output, expected, key) for key in TOLERANCE}
                good = all(worst[key] <= bound for key, bound in TOLERANCE.items())
                failed += not good
                words = ", ".join(f"{key} {value:.1e}" for key, value in worst.items())
                print(f"{'ok  ' if good else 'FAIL'} {model:8s} {mesh:12s} {given.steps} steps: {words}", flush=True)
    return 1 if failed else 0


def _config(output: Path, text: Path, model: str, steps: int, mesh: str | None = None) -> TrainingConfig:
    return TrainingConfig(
        text=(str(text),), output=str(output), model=MODELS[model], vocab_size=320, block_size=32, batch_size=8,
        micro_batch_size=2, steps=steps, warmup_steps=5, grad_clip=0.5, eval_every=steps, device="cpu", mesh=mesh,
        log_every=steps,
    )  # fmt: skip


def _first_step(config: TrainingConfig) -> TrainingConfig:
    """One step alone: without momentum the first moment is the gradient, clipped."""
    output = config.output + FIRST
    return dataclasses.replace(config, output=output, steps=1, warmup_steps=0, beta1=0.0, checkpoint_format="sharded")


def _train_over(configs: Sequence[TrainingConfig], processes: int) -> None:
    files = []
    for config in configs:
        for run in (config, _first_step(config)):
            Path(run.output).mkdir(parents=True)
            files.append(Path(run.output) / "run.json")
            run.save(files[-1])
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
         __file__, "--train", *map(str, files)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _train_here(files: Sequence[str]) -> int:
    with joined(torch.device("cpu")) as processes:
        for file in files:
            train_among(processes, TrainingConfig.from_dict(json.loads(Path(file).read_text(encoding="utf-8"))))
        processes.barrier()
    return 0


def _difference(output: Path, alone: Path, key: str) -> float:
    """The largest relative difference of a step's value, or of a parameter's gradient."""
    if key == "gradients":
        first, expected = (_first_moments(Path(f"{one}{FIRST}") / "checkpoint-1") for one in (output, alone))
        assert first.keys() == expected.keys() and expected
        return max(float((first[name] - one).norm() / one.norm().clamp(min=1e-30)) for name, one in expected.items())
    found, wanted = (
        [line[key] for line in read_metrics(folder / "metrics.jsonl") if key in line] for folder in (output, alone)
    )
    assert len(found) == len(wanted) > 0
    return max(abs(one / other - 1) for one, other in zip(found, wanted, strict=True))


def _first_moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    names = {name: one for name, one in saved_tensors(checkpoint).items() if name.startswith("optimizer.exp_avg.")}
    tensors = {name: torch.zeros(one.size) for name, one in names.items()}
    load_shards(tensors, checkpoint)
    return tensors


if __name__ == "__main__":
    sys.exit(main())
