"""The trainer on a CPU against what its users had: ratios of medians, each pair measured in turns in one run.

    python scripts/bench_train.py [--quick] [--json report.json] [--only throughput overhead start meshes checkpoint]

    throughput   tokens/s and memory of a Llama of 30 M parameters, sequences of 512, fp32 and bf16, against
                 transformers' Trainer with transformers' own class, each in processes of its own
    overhead     the trainer's step against the same step in a bare loop, by turns in one process
    start        from the start of the process to the first step, against importing torch and transformers
    meshes       FSDP2 over two processes against DistributedDataParallel, by turns in the same two
    checkpoint   how long a sharded checkpoint holds the loop up, in the background against at once

--quick takes a small model and few steps, to see that the script runs: its ratios mean nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LENGTH, BATCH, THREADS = 512, 2, 2
# ratio -> its bar
AT_LEAST = {"tokens/s fp32": 1.5, "tokens/s bf16": 1.5, "FSDP2 over DDP": 0.85}
AT_MOST = {
    "memory fp32": 0.7, "memory bf16": 0.7, "trainer over bare loop": 1.02, "start over imports": 1.2,
    "stall, background over at once": 0.05,
}  # fmt: skip
WARMUP = 2  # steps that are not counted
Seconds = dict[str, list[float]]


def architecture(quick: bool) -> dict[str, Any]:
    """A Llama of 30 M parameters, 12 M of them embeddings."""
    sizes = (64, 128, 2, 4) if quick else (384, 1024, 10, 6)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        "model_type": "llama", **dict(zip(names, sizes, strict=True)), "num_key_value_heads": sizes[3],
        "tie_word_embeddings": True, "max_position_embeddings": LENGTH,
    }  # fmt: skip


def write_inputs(folder: Path, quick: bool) -> None:
    """A text of random words and a tokenizer with one token for each."""
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = 500 if quick else 32_000
    vocabulary = {f"w{number}": number for number in range(words - 1)} | {"<end>": words - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder / "tokenizer")
    drawn = np.random.default_rng(0).integers(0, words - 1, LENGTH * 64)
    (folder / "text.txt").write_text(" ".join(f"w{number}" for number in drawn))


def config_of(folder: Path, quick: bool, **changes: Any) -> Any:
    from easytorch.training import TrainingConfig

    return TrainingConfig.from_dict(
        {
            "text": [str(folder / "text.txt")], "output": str(folder / f"run-{time.time_ns()}"),
            "model": architecture(quick), "tokenizer": str(folder / "tokenizer"), "block_size": LENGTH,
            "batch_size": BATCH, "warmup_steps": 0, "eval_fraction": 0.0, "save_every": 0, "device": "cpu",
            "schedule": "constant", "learning_rate": 1e-4, **changes,
        }
    )  # fmt: skip


def peak() -> int:
    """The largest memory of this process up to now, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def around_steps(call: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """`call(run, step)` in place of each step of the trainer."""
    from easytorch.training import loop

    step = loop._Run._train_step
    loop._Run._train_step = lambda run: call(run, step)  # type: ignore[method-assign,assignment]


# What a child process measures: seconds by name, which it prints as one line of JSON.


def ours(folder: Path, quick: bool, steps: int, dtype: str) -> Seconds:
    from easytorch.training import train

    config = config_of(folder, quick, steps=steps, dtype="bfloat16" if dtype == "bf16" else "float32")
    ends, peaks, before = list[float](), list[float](), peak()

    def timed(run: Any, step: Callable[[Any], None]) -> None:
        step(run)
        ends.append(time.perf_counter())
        peaks.append(peak() - before)

    around_steps(timed)
    train(config)
    # before the checkpoint of the end, which the other does not write
    return {"step": gaps(ends), "memory": [peaks[-1]]}


def trainer(folder: Path, quick: bool, steps: int, dtype: str) -> Seconds:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    ids = tokenizer((folder / "text.txt").read_text(), verbose=False)["input_ids"]
    rows = [{"input_ids": ids[at : at + LENGTH], "labels": ids[at : at + LENGTH]} for at in range(0, len(ids), LENGTH)]
    given = architecture(quick) | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    ends, before = list[float](), peak()

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            ends.append(time.perf_counter())

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**given, bos_token_id=None))
    assert type(model).__module__.startswith("transformers.")
    arguments = transformers.TrainingArguments(
        str(folder / "trainer"), max_steps=steps, per_device_train_batch_size=BATCH, use_cpu=True, bf16=dtype == "bf16",
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
        learning_rate=1e-4, weight_decay=0.1, adam_beta2=0.95,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[Clock()]).train()
    return {"step": gaps(ends), "memory": [peak() - before]}


def overhead(folder: Path, quick: bool, steps: int, dtype: str) -> Seconds:
    """A step of the trainer and the same by hand, on a copy of its model, first the one and then the other."""
    import torch

    from easytorch.training import train
    from easytorch.training.optimizers import make_optimizer

    config = config_of(folder, quick, steps=steps)
    found: Seconds = {"trainer": [], "bare": []}
    bare: Any = None

    def by_hand(tokens: torch.Tensor) -> None:
        model, optimizer = bare
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    def both(run: Any, step: Callable[[Any], None]) -> None:
        nonlocal bare
        if bare is None:
            model = copy.deepcopy(run.model).train()
            bare = model, make_optimizer(model, config)
        tokens = run.task.rows(run.task.indices(run.step, BATCH, config.seed))["input_ids"]
        calls = {"trainer": lambda: step(run), "bare": lambda: by_hand(tokens)}
        for name in sorted(calls, reverse=bool(run.step % 2)):
            start = time.perf_counter()
            calls[name]()
            found[name].append(time.perf_counter() - start)

    around_steps(both)
    train(config)
    return {name: values[WARMUP:] for name, values in found.items()}


def start(folder: Path, quick: bool, steps: int, dtype: str) -> Seconds:
    """With a small model, since making a large one takes what its size says."""
    from easytorch.training import train

    found = list[float]()

    def first(run: Any, step: Callable[[Any], None]) -> None:
        found.append(time.time() - float(os.environ["BENCH_STARTED"]))
        step(run)

    around_steps(first)
    train(config_of(folder, True, steps=1))
    return {"start": found[:1]}


def imports(folder: Path, quick: bool, steps: int, dtype: str) -> Seconds:
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    assert torch and AutoTokenizer and LlamaForCausalLM
    return {"imports": [time.time() - float(os.environ["BENCH_STARTED"])]}


def meshes(folder: Path, quick: bool, steps: int, dtype: str) -> Seconds:
    """One of two processes: runs of either mesh by turns."""
    from easytorch.training.loop import train_among
    from easytorch.training.processes import find_device, joined

    ends = defaultdict[str, list[list[float]]](list)

    def timed(run: Any, step: Callable[[Any], None]) -> None:
        if run.step == 0:
            ends[run.config.mesh].append([])
        step(run)
        ends[run.config.mesh][-1].append(time.perf_counter())

    around_steps(timed)
    with joined(find_device("cpu")) as processes:
        for number in range(4):
            mesh = ("dp=-1", "fsdp=-1")[number % 2]
            output = str(folder / f"mesh-{number}")
            train_among(
                processes, config_of(folder, quick, steps=steps, mesh=mesh, output=output, batch_size=2 * BATCH)
            )
    return {name: [second for one in runs for second in gaps(one)] for name, runs in ends.items()}


def checkpoint(folder: Path, quick: bool, steps: int, dtype: str) -> Seconds:
    """Each run saves after the second step, in the background or not; steps behind it let the background finish.

    What the loop waits before the next update, for copies of a save in the background, is part of its stall.
    """
    from easytorch.training import saving, train

    found = defaultdict[str, list[float]](list)
    save, before_update = saving.CheckpointSaver.save, saving.CheckpointSaver.before_update

    def timed(saver: Any, step: int, *arguments: Any) -> None:
        before = time.perf_counter()
        save(saver, step, *arguments)
        if step % 2 == 0:
            found["background" if saver.config.async_checkpoint else "at once"].append(time.perf_counter() - before)

    def waited(saver: Any) -> None:
        before = time.perf_counter()
        copying = saver._stager._copying is not None
        before_update(saver)
        if copying:
            found["background"][-1] += time.perf_counter() - before

    saving.CheckpointSaver.before_update = waited  # type: ignore[method-assign]
    saving.CheckpointSaver.save = timed  # type: ignore[method-assign,assignment]
    for number in range(4):
        background = bool(number % 2)
        train(config_of(
            folder, quick, steps=steps + 1, save_every=2, checkpoint_format="sharded", async_checkpoint=background,
        ))  # fmt: skip
    return dict(found)


CHILDREN: dict[str, Callable[[Path, bool, int, str], Seconds]] = {
    one.__name__: one for one in (ours, trainer, overhead, start, imports, meshes, checkpoint)
}


def gaps(ends: list[float]) -> list[float]:
    """From the end of a step to that of the next, after the warm-up."""
    return [after - before for before, after in zip(ends[WARMUP - 1 :], ends[WARMUP:], strict=False)]


class Bench:
    """Children in turns, and the medians of what they printed."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self.folder, self.quick = folder, quick
        self.measured: dict[str, list[float]] = defaultdict(list)
        self.ratios: dict[str, float] = {}

    def child(self, name: str, steps: int = 1, dtype: str = "fp32", processes: int = 1) -> None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, *(torchrun if processes > 1 else []), __file__, "--child", name]
        command += ["--folder", str(self.folder), "--steps", str(steps), "--dtype", dtype]
        environment = {
            **os.environ, "OMP_NUM_THREADS": str(THREADS // processes), "HF_HUB_OFFLINE": "1",
            "BENCH_STARTED": str(time.time()),
        }  # fmt: skip
        # installed packages have their bytecode: so has a checkout, but where this forbids to write it
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        done = subprocess.run(
            [*command, *(["--quick"] if self.quick else [])], env=environment, capture_output=True, text=True
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"bench"')]
        if done.returncode or not lines:
            raise SystemExit(f"{' '.join(command)} failed with code {done.returncode}:\n{done.stderr[-3000:]}")
        for key, values in json.loads(lines[0])["bench"].items():
            self.measured[f"{name} {dtype} {key}"] += values

    def median(self, key: str) -> float:
        return statistics.median(self.measured[key])

    def throughput(self) -> None:
        rounds, steps = (1, 4) if self.quick else (2, 7)
        for dtype in ("fp32", "bf16"):
            for number in range(rounds):
                for name in ("ours", "trainer") if number % 2 == 0 else ("trainer", "ours"):
                    self.child(name, steps, dtype)
            self.ratios[f"tokens/s {dtype}"] = self.median(f"trainer {dtype} step") / self.median(f"ours {dtype} step")
            memory = self.median(f"ours {dtype} memory") / self.median(f"trainer {dtype} memory")
            self.ratios[f"memory {dtype}"] = memory

    def overhead(self) -> None:
        self.child("overhead", 6 if self.quick else 16)
        both = zip(self.measured["overhead fp32 trainer"], self.measured["overhead fp32 bare"], strict=True)
        self.ratios["trainer over bare loop"] = statistics.median(ours / bare for ours, bare in both)

    def start(self) -> None:
        for _ in range(1 if self.quick else 4):
            for name in ("imports", "start"):
                self.child(name)
        self.ratios["start over imports"] = self.median("start fp32 start") / self.median("imports fp32 imports")

    def meshes(self) -> None:
        self.child("meshes", 4 if self.quick else 8, processes=2)
        self.ratios["FSDP2 over DDP"] = self.median("meshes fp32 dp=-1") / self.median("meshes fp32 fsdp=-1")

    def checkpoint(self) -> None:
        self.child("checkpoint", 4 if self.quick else 6)
        stalls = self.median("checkpoint fp32 background") / self.median("checkpoint fp32 at once")
        self.ratios["stall, background over at once"] = stalls


PARTS = ("throughput", "overhead", "start", "meshes", "checkpoint")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, few steps")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", metavar="FILE", help="write medians, ratios and versions there")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        found = CHILDREN[given.child](given.folder, given.quick, given.steps, given.dtype)
        if os.environ.get("RANK", "0") == "0":
            print("\n" + json.dumps({"bench": found}), flush=True)
        return 0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), given.quick)
        bench = Bench(Path(name), given.quick)
        for part in given.only:
            getattr(bench, part)()
    versions = {package: version(package) for package in ("torch", "transformers", "accelerate")}
    report = {
        "versions": {"python": platform.python_version(), **versions}, "processor": platform.processor(),
        "threads": THREADS, "quick": given.quick, "seconds": round(time.perf_counter() - began),
        "medians": {key: statistics.median(values) for key, values in bench.measured.items()}, "ratios": bench.ratios,
    }  # fmt: skip
    for key, value in report["medians"].items():
        print(f"{key:40} {f'{value / 2**20:10.1f} MiB' if key.endswith('memory') else f'{value:10.4f} s'}")
    missed = 0
    for key, ratio in bench.ratios.items():
        least = key in AT_LEAST
        bar = (AT_LEAST if least else AT_MOST)[key]
        holds = ratio >= bar if least else ratio <= bar
        missed += not holds
        print(f"{key:40} {ratio:10.3f}   {'at least' if least else 'at most'} {bar}{'' if holds else '   MISSED'}")
    print(", ".join(f"{name} {one}" for name, one in report["versions"].items()), f"; {report['seconds']} s")
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed and not given.quick else 0


if __name__ == "__main__":
    sys.exit(main())
