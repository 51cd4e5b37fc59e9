"""Train small models over meshes of 2 and 4 processes and compare each with one process, step by step.

    scripts/check_meshes.py [--steps 50] [--models dense experts] [--meshes fsdp=2 fsdp=2,tp=2 ...]

Same seed and data: losses to 1e-5 of one process's over all steps, in float32, and gradient norms to 1e-4. Prints a
line for each mesh, and exits with 1 where one differs.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from easytorch.distributed.mesh import parse_axes  # noqa: E402
from easytorch.training import TrainingConfig, train  # noqa: E402
from easytorch.training.metrics import read_metrics  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "intermediate_size": 96, "tie_word_embeddings": True, **SIZES},
    "qk-norms": {"model_type": "qwen3", "head_dim": 8, "intermediate_size": 96, **SIZES},
    "experts": {
        "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, **SIZES,
    },
}  # fmt: skip
MESHES = ("dp=2", "fsdp=2", "tp=2", "dp=4", "fsdp=4", "dp=2,fsdp=2", "dp=2,tp=2", "fsdp=2,tp=2", "tp=4")
TOLERANCE = {"loss": 1e-5, "gradient_norm": 1e-4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--meshes", nargs="+", default=MESHES)
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
        for model in given.models:
            config = _config(Path(folder) / model, text, model, given.steps)
            train(config)
            for mesh in given.meshes:
                output = Path(folder) / f"{model}-{mesh}"
                _train_over(_config(output, text, model, given.steps, mesh), mesh)
                worst = {key: _difference(output, Path(config.output), key) for key in TOLERANCE}
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


def _train_over(config: TrainingConfig, mesh: str) -> None:
    Path(config.output).mkdir(parents=True)
    path = Path(config.output) / "run.json"
    config.save(path)
    processes = math.prod(int(size.partition("=")[2]) for size in mesh.split(","))
    assert parse_axes(mesh, processes)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
         "-m", "easytorch.training", "--config", str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _difference(output: Path, alone: Path, key: str) -> float:
    """The largest relative difference of a step's value."""
    found, wanted = (
        [line[key] for line in read_metrics(folder / "metrics.jsonl") if key in line] for folder in (output, alone)
    )
    assert len(found) == len(wanted) > 0
    return max(abs(one / other - 1) for one, other in zip(found, wanted, strict=True))


if __name__ == "__main__":
    sys.exit(main())
