"""Resume training from the sharded checkpoint of every mesh on every other, and compare with one process's run.

    scripts/check_checkpoints.py [--models dense experts] [--meshes one dp=2 fsdp=2 tp=2 fsdp=2,tp=2]

Three steps on one mesh, three more on another: losses to 1e-5 of six steps of one process, in float32. On the same
mesh, written in the background, weights and moments must be those of an uninterrupted run to the bit. Prints a line for
each pair, and exits with 1 where one differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from easytorch.training import TrainingConfig, train  # noqa: E402
from easytorch.training.metrics import read_metrics  # noqa: E402
from scripts.check_meshes import MODELS  # noqa: E402

MESHES = ("one", "dp=2", "fsdp=2", "tp=2", "fsdp=2,tp=2")
HALF, STEPS = 3, 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["dense", "experts"])
    parser.add_argument("--meshes", nargs="+", default=MESHES)
    parser.add_argument("--configs", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.configs:
        return _run(given.configs)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
        for model in given.models:
            failed += _check(folder / model, text, model, given.meshes)
    return 1 if failed else 0


def _check(folder: Path, text: Path, model: str, meshes: Sequence[str]) -> int:
    alone = TrainingConfig(
        text=(str(text),), output=str(folder / "alone"), model=MODELS[model], vocab_size=320, block_size=32,
        batch_size=8, micro_batch_size=2, steps=STEPS, warmup_steps=2, grad_clip=0.5, save_every=HALF, eval_every=STEPS,
        device="cpu", checkpoint_format="sharded",
    )  # fmt: skip
    train(alone)
    full = {mesh: dataclasses.replace(alone, output=str(folder / f"from {mesh}"), mesh=_axes(mesh)) for mesh in meshes}
    for mesh, config in full.items():
        _launch(mesh, [config])
    for target in meshes:
        configs = {}
        for source in meshes:
            output = folder / f"{source} to {target}"
            shutil.copytree(Path(full[source].output) / f"checkpoint-{HALF}", output / f"checkpoint-{HALF}")
            shutil.copy(Path(full[source].output) / "metrics.jsonl", output)
            change = ("mesh", "processes")
            configs[source] = dataclasses.replace(
                full[target], output=str(output), resume=True, change=change, async_checkpoint=True
            )
        _launch(target, list(configs.values()))
        for source, config in configs.items():
            words, good = _compare(config, alone, full[target] if source == target else None)
            print(f"{'ok  ' if good else 'FAIL'} {model:8s} {source:12s} to {target:12s} {words}", flush=True)
            if not good:
                return 1
    return 0


def _compare(config: TrainingConfig, alone: TrainingConfig, same: TrainingConfig | None) -> tuple[str, bool]:
    losses = [
        [line["loss"] for line in read_metrics(Path(one.output) / "metrics.jsonl") if "loss" in line]
        for one in (config, alone)
    ]
    assert len(losses[0]) == len(losses[1]) == STEPS, [len(one) for one in losses]
    worst = max(abs(one / other - 1) for one, other in zip(*losses, strict=True))
    if same is None:
        return f"loss {worst:.1e}", worst <= 1e-5
    equal = True
    for file in sorted((Path(same.output) / f"checkpoint-{STEPS}").glob("shard-*.safetensors")):
        found, wanted = load_file(Path(config.output) / f"checkpoint-{STEPS}" / file.name), load_file(file)
        equal &= found.keys() == wanted.keys() and all(torch.equal(found[name], one) for name, one in wanted.items())
    return f"loss {worst:.1e}, {'the same bits' if equal else 'OTHER BITS'}", worst <= 1e-5 and equal


def _axes(mesh: str) -> str | None:
    return None if mesh == "one" else mesh


def _launch(mesh: str, configs: Sequence[TrainingConfig]) -> None:
    """All runs one after the other in the same processes."""
    files = []
    for config in configs:
        Path(config.output).mkdir(parents=True, exist_ok=True)
        files.append(Path(config.output) / "run.json")
        config.save(files[-1])
    processes = 1 if mesh == "one" else math.prod(int(size.partition("=")[2]) for size in mesh.split(","))
    start = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    subprocess.run(
        [sys.executable, *start, __file__, "--configs", *map(str, files)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _run(files: Sequence[str]) -> int:
    from easytorch.training.loop import train_among
    from easytorch.training.processes import joined

    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as processes:
        for file in files:
            train_among(processes, TrainingConfig.from_dict(json.loads(Path(file).read_text(encoding="utf-8"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
