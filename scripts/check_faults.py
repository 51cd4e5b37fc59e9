"""Kill a rank of a run under `torchrun --max-restarts` at random moments, and compare with the uninterrupted run.

    scripts/check_faults.py [--trials 20] [--seed 0] [--mesh fsdp=2]

A trial kills one of two processes or both with SIGKILL: at a random step, or as soon as a random checkpoint is being
written.
The restarted run must end with the uninterrupted losses, weights and moments, to the bit, and leave no hidden folder.
Prints a line for each trial, and exits with 1 where one differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from easytorch.training import TrainingConfig  # noqa: E402
from easytorch.training.metrics import read_metrics  # noqa: E402
from scripts.check_meshes import MODELS  # noqa: E402

LOG = "stderr.txt"
STEPS, SAVE_EVERY, PATIENCE = 40, 4, 900


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mesh", default="fsdp=2")
    given = parser.parse_args()
    draw, failed = random.Random(given.seed), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
        alone = TrainingConfig(
            text=(str(text),), output=str(folder / "alone"), model=MODELS["experts"], vocab_size=320, block_size=32,
            batch_size=8, steps=STEPS, warmup_steps=2, save_every=SAVE_EVERY, eval_every=STEPS, device="cpu",
            mesh=given.mesh, async_checkpoint=True, resume=True,
        )  # fmt: skip
        assert _start(alone).wait(PATIENCE) == 0
        for trial in range(given.trials):
            config = dataclasses.replace(alone, output=str(folder / f"trial-{trial}"))
            saving, moment = bool(draw.getrandbits(1)), draw.randrange(1, STEPS - 2)
            if saving:
                moment = max(SAVE_EVERY, moment // SAVE_EVERY * SAVE_EVERY)
            ranks = draw.choice(((0,), (1,), (0, 1)))
            words = killed_once(config, moment, saving, ranks) or differences(config, alone)
            failed += bool(words)
            what = f"while checkpoint-{moment} is written" if saving else f"after step {moment}"
            who = f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"
            print(f"{'FAIL' if words else 'ok  '} {given.mesh} {who} killed {what} {words}", flush=True)
    return 1 if failed else 0


def killed_once(config: TrainingConfig, moment: int, saving: bool, ranks: tuple[int, ...]) -> str:
    """Run `config` under torchrun, and kill the ranks once; why it did not end well, or ""."""
    running = _start(config)
    output, until = Path(config.output), time.monotonic() + PATIENCE
    try:
        while not _reached(output, moment, saving):
            if running.poll() is not None or time.monotonic() > until:
                return f"ended with {running.returncode} before it was killed"
            time.sleep(0.002)
        killed = 0
        for process in _ranks(running.pid):
            if any(f"\0RANK={rank}\0" in _environment(process) for rank in ranks):
                os.kill(process, signal.SIGKILL)
                killed += 1
        if not killed:
            return "had no such rank any more"
        code = running.wait(PATIENCE)
        return f"ended with {code}: {_errors(output)}" if code else ""
    finally:
        if running.poll() is None:
            running.kill()


def differences(config: TrainingConfig, alone: TrainingConfig) -> str:
    """What the run has other than the uninterrupted one, or ""."""
    curves = [
        [line["loss"] for line in read_metrics(Path(one.output) / "metrics.jsonl") if "loss" in line]
        for one in (config, alone)
    ]
    if curves[0] != curves[1]:
        return f"has another curve: {len(curves[0])} losses, {curves[0][-1]} and not {curves[1][-1]} at the end"
    for wanted in sorted((Path(alone.output) / f"checkpoint-{alone.steps}").glob("shard-*.safetensors")):
        found = load_file(Path(config.output) / wanted.parent.name / wanted.name)
        if not all(torch.equal(found[name], one) for name, one in load_file(wanted).items()):
            return f"has other values in {wanted.name}"
    hidden = [path.name for path in Path(config.output).iterdir() if path.name.startswith(".")]
    return f"has left {hidden[0]}" if hidden else ""


def _start(config: TrainingConfig) -> subprocess.Popen[bytes]:
    Path(config.output).mkdir(parents=True, exist_ok=True)
    path = Path(config.output) / "run.json"
    config.save(path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with (path.parent / LOG).open("wb") as log:
        return subprocess.Popen(
            [*torchrun, "-m", "easytorch.training", "--config", str(path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL, stderr=log,
        )  # fmt: skip


def _errors(output: Path) -> str:
    lines = (output / LOG).read_text(errors="replace").splitlines()
    return " | ".join(line for line in lines if "rror" in line)[:2000]


def _reached(output: Path, moment: int, saving: bool) -> bool:
    if saving:
        return next(output.glob(f".checkpoint-{moment}.*.partial/new"), None) is not None
    metrics = output / "metrics.jsonl"
    return metrics.exists() and metrics.read_bytes().count(b"\n") >= moment


def _ranks(parent: int) -> list[int]:
    """The child processes of torchrun."""
    children = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(one) for file in children for one in file.read_text().split()]


def _environment(process: int) -> str:
    try:
        return "\0" + Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
