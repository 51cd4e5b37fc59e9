"""Conversions against copying: how fast checkpoints go from torch to Flax and back, and what memory that takes.

    python scripts/bench_bridge.py [--size 2GB] [--only llama] [--repeats 5] [--naive] [--check]
    python scripts/bench_bridge.py --rss [--size 10GB]      memory above the start, instead of speed
    python scripts/bench_bridge.py --commands [--only llama]    what `easytorch convert`, `inspect` and `diff` take

Speed is bytes of the result a second, as a share of what `cp` and a sync of the same bytes reach in the same run, in
turns; inputs are in the page cache, and the destination's sync is part of every time. `--naive` also runs what one
would write by hand: flax's msgpack_restore, torch.from_numpy, safetensors' save_file, and the same backwards. `--check`
exits 1 where a bar of the table is missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402 - a script of the checkout

from easytorch.bridge.convert import convert  # noqa: E402
from easytorch.bridge.core.sizes import parse_size  # noqa: E402
from easytorch.bridge.core.tensor_info import TensorInfo  # noqa: E402
from easytorch.bridge.dtypes import numpy_dtype  # noqa: E402
from easytorch.bridge.jobs import targets  # noqa: E402


@dataclass(frozen=True)
class Model:
    """A model as large as asked for: what transformers makes of `config` with enough of `grow`."""

    config: dict[str, Any]
    dtype: str
    grow: str
    # The share of cp's speed that a conversion is to reach.
    bar: float


_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048}
_BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 1024}
MODELS = {
    # Large matrices, nearly all transposed.
    "llama": Model(
        _LLAMA | {"intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
        "bfloat16",
        "num_hidden_layers",
        0.5,
    ),
    # Many smaller matrices, all transposed.
    "bert": Model(
        _BERT | {"intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 30522},
        "float32",
        "num_hidden_layers",
        0.5,
    ),
    # One table, over flax's limit for an array, that nothing is done to: Gemma's output has no weights of its own.
    "embeddings": Model(
        {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "hidden_size": 2048, "head_dim": 64}
        | {"intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1},
        "bfloat16",
        "vocab_size",
        0.7,
    ),
}


# A shard that holds any of them.
_WHOLE = 1 << 50


class Made:
    """Random bits, other ones for every tensor; the rows of a matrix overlap, so that it takes no memory."""

    config = None

    def __init__(self, infos: Sequence[TensorInfo]) -> None:
        self._bits = np.random.default_rng(0).integers(0, 256, 32 << 20, dtype=np.uint8)
        self._infos = {info.name: (number, info) for number, info in enumerate(infos)}

    def read(self, name: str) -> np.ndarray:
        number, info = self._infos[name]
        elements = self._bits.view(numpy_dtype(info.dtype))[997 * number :]
        columns = info.shape[-1]
        rows = math.prod(info.shape[:-1])
        step = (len(elements) - columns) // rows
        assert step > 0, f"{name} is too large to be made up of {len(elements)} elements"
        strides = (step * elements.itemsize, elements.itemsize)
        return np.lib.stride_tricks.as_strided(elements, (rows, columns), strides).reshape(info.shape)

    def wrote(self, info: TensorInfo) -> None:
        pass


def tensors_of(model: Model, size: int) -> tuple[dict[str, Any], list[TensorInfo]]:
    """The config that makes `model` about `size` bytes, and its weights as transformers saves them."""
    import torch
    import transformers

    def infos(config: dict[str, Any]) -> list[TensorInfo]:
        loaded = transformers.AutoConfig.for_model(**config)
        with torch.device("meta"):
            made = getattr(transformers, config["architectures"][0])(loaded)
        tied = getattr(made, "all_tied_weights_keys", {})
        state = {name: tensor for name, tensor in made.state_dict().items() if name not in tied}
        return [TensorInfo(name, tuple(tensor.shape), model.dtype) for name, tensor in state.items()]

    def nbytes(count: int) -> int:
        return sum(info.nbytes for info in infos({**model.config, model.grow: count}))

    one = nbytes(2) - nbytes(1)
    count = max(1, round((size - nbytes(1)) / one) + 1)
    config = {**model.config, model.grow: count, "dtype": model.dtype}
    return config, infos(config)


def make(folder: Path, model: Model, size: int, shard: int) -> int:
    """A torch checkpoint of `model` in `folder`; its bytes."""
    config, infos = tensors_of(model, size)
    format_ = targets.target("torch").format
    folder.mkdir()
    source, layout = Made(infos), format_.layout(infos, shard)
    for file, group in layout.items():
        format_.write(folder, file, group, source)
    format_.finish(folder, layout, source)
    (folder / "config.json").write_text(json.dumps(config))
    return sum(info.nbytes for info in infos)


def sync(path: Path) -> None:
    for file in [*path.iterdir(), path] if path.is_dir() else [path]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def copy(source: Path, destination: Path) -> None:
    subprocess.run(["cp", "-r", source, destination], check=True)
    sync(destination)


def naive_to_torch(source: Path, destination: Path) -> None:
    import torch
    from flax.serialization import msgpack_restore
    from flax.traverse_util import flatten_dict
    from safetensors.torch import save_file

    destination.mkdir()
    leaves = flatten_dict(msgpack_restore((source / "flax_model.msgpack").read_bytes()), sep=".")
    state = {}
    for name, leaf in leaves.items():
        tensor = torch.from_numpy(np.array(leaf).view(f"i{leaf.itemsize}")).view(getattr(torch, leaf.dtype.name))
        state[name] = tensor.T.contiguous() if name.endswith("kernel") else tensor
    save_file(state, destination / "model.safetensors")
    sync(destination)


def naive_to_flax(source: Path, destination: Path) -> None:
    import torch
    from flax.serialization import to_bytes
    from flax.traverse_util import unflatten_dict
    from safetensors.torch import load_file

    destination.mkdir()
    leaves = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensor = tensor.T.contiguous() if tensor.ndim == 2 and "embed" not in name else tensor
        bits = tensor.view(getattr(torch, f"int{8 * tensor.itemsize}")).numpy()
        leaves[name] = bits.view(numpy_dtype(str(tensor.dtype).removeprefix("torch.")))
    (destination / "flax_model.msgpack").write_bytes(to_bytes(unflatten_dict(leaves, sep=".")))
    sync(destination)


def timed(run: Callable[[Path, Path], object], source: Path, scratch: Path) -> float:
    destination = scratch / "made"
    begun = time.perf_counter()
    run(source, destination)
    seconds = time.perf_counter() - begun
    shutil.rmtree(destination)
    return seconds


def speed(name: str, size: int, repeats: int, naive: bool, scratch: Path) -> Iterator[dict[str, Any]]:
    """One row for each direction."""
    torch, flax = scratch / "torch", scratch / "flax"
    nbytes = make(torch, MODELS[name], size, _WHOLE)
    convert(torch, flax, to="flax", max_shard_size=_WHOLE)
    runs: dict[str, tuple[Callable[[Path, Path], object], Path]] = {
        "cp": (copy, torch),
        "torch -> flax": (lambda a, b: convert(a, b, to="flax", max_shard_size=_WHOLE), torch),
        "flax -> torch": (lambda a, b: convert(a, b, to="torch", max_shard_size=_WHOLE), flax),
    }
    if naive:
        # Else the first run would be the one that loads them.
        for module in ("flax.serialization", "flax.traverse_util", "safetensors.torch"):
            importlib.import_module(module)
        runs |= {"naive torch -> flax": (naive_to_flax, torch), "naive flax -> torch": (naive_to_torch, flax)}
    seconds: dict[str, list[float]] = {key: [] for key in runs}
    for turn in range(repeats + 1):
        for key, (run, source) in runs.items():
            took = timed(run, source, scratch)
            # The first turn is for the caches, and is all of the slow one.
            if turn or key.startswith("naive"):
                seconds[key].append(took)
        if turn:
            runs = {key: run for key, run in runs.items() if not key.startswith("naive")}
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    for direction in ("torch -> flax", "flax -> torch"):
        slow = middle.get(f"naive {direction}")
        yield {
            "model": name,
            "direction": direction,
            "bytes": nbytes,
            "seconds": middle[direction],
            "cp_seconds": middle["cp"],
            "of_cp": middle["cp"] / middle[direction],
            "bar": MODELS[name].bar,
            "over_naive": None if slow is None else slow / middle[direction],
        }
    shutil.rmtree(torch)
    shutil.rmtree(flax)


# Runs one conversion, and waits for a line on stdin before it, so that what is imported is not counted.
_CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, transformers
from easytorch.bridge.convert import convert
convert(sys.argv[2], sys.argv[2] + "-warm", to=sys.argv[5])
print("ready", flush=True)
sys.stdin.readline()
convert(sys.argv[3], sys.argv[4], to=sys.argv[5], max_shard_size=sys.argv[6])
print("done", flush=True)
sys.stdin.readline()
"""


def _status(pid: int) -> dict[str, int]:
    """Bytes that /proc counts for the process: VmRSS in all, RssAnon of its own, RssFile of mapped files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = (line.split() for line in lines if line.startswith(("VmRSS", "RssAnon", "RssFile")))
    return {name.rstrip(":"): int(count) << 10 for name, count, _ in fields}


def peak(small: Path, source: Path, destination: Path, to: str, shard: str) -> dict[str, int]:
    """The most memory a conversion takes above its start, by sampling every two milliseconds."""
    command = [sys.executable, "-c", _CHILD, ROOT, small, source, destination, to, shard]
    with subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n", "the conversion of a small model failed"
        start = _status(child.pid)
        most = dict(start)
        child.stdin.write("\n")
        child.stdin.flush()
        os.set_blocking(child.stdout.fileno(), False)
        while not (line := child.stdout.readline()) and child.poll() is None:
            now = _status(child.pid)
            most = {name: max(count, now.get(name, 0)) for name, count in most.items()}
            time.sleep(0.002)
        if line != "done\n":
            raise RuntimeError(f"converting {source} to {to} failed")
        child.stdin.write("\n")
        child.stdin.flush()
    return {name: most[name] - start[name] for name in start}


def memory(name: str, size: int, shard: int, scratch: Path) -> Iterator[dict[str, Any]]:
    """One row for each direction, of checkpoints in shards."""
    small, torch, flax, back = (scratch / one for one in ("small", "torch", "flax", "back"))
    make(small, MODELS[name], 50_000_000, 10**9)
    _, infos = tensors_of(MODELS[name], size)
    row = {"model": name, "bytes": make(torch, MODELS[name], size, shard), "largest": max(i.nbytes for i in infos)}
    yield row | {"direction": "torch -> flax"} | peak(small, torch, flax, "flax", str(shard))
    shutil.rmtree(torch)
    shutil.rmtree(scratch / "small-warm")
    yield row | {"direction": "flax -> torch"} | peak(small, flax, back, "torch", str(shard))
    for folder in (small, flax, back, scratch / "small-warm"):
        shutil.rmtree(folder)


# The sizes of such models: what is timed is the start of a command, and no data.
_TINY = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 256, "num_attention_heads": 4}
_TINY |= {"num_key_value_heads": 2}
# What a command may take on a model of a few kB, where there is nothing to do but to start, in seconds.
_COMMAND_BARS = {"inspect": 0.4, "diff": 0.4, "convert to flax": 0.8, "convert to torch": 0.8}
# What they took, in processor seconds, while conversions built their model on the meta device (commit c2ca62e).
_COMMAND_BEFORE = {"inspect": 0.54, "diff": 7.1, "convert to flax": 7.1, "convert to torch": 7.2}
# What takes long to import, and which of it a command needed.
_HEAVY = ("torch", "transformers", "jax", "tensorstore", "numpy")


def commands(name: str, size: int, repeats: int, scratch: Path) -> Iterator[dict[str, Any]]:
    """One row for each command, run as a user types it: a process of its own, from its start to its end."""
    torch, flax = scratch / "torch", scratch / "flax"
    model = MODELS[name]
    tiny = {key: min(value, _TINY[key]) for key, value in model.config.items() if key in _TINY}
    make(torch, replace(model, config=model.config | tiny), size, _WHOLE)
    convert(torch, flax, to="flax")
    typed = {
        "inspect": ["inspect", torch],
        "diff": ["diff", torch, flax],
        "convert to flax": ["convert", torch, scratch / "made", "--to", "flax"],
        "convert to torch": ["convert", flax, scratch / "made", "--to", "torch"],
    }
    # As an installed package has it: bytecode is compiled once, and kept.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(scratch / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = statistics.median(processor_seconds([sys.executable, "-c", "pass"], environment) for _ in range(repeats))
    for command, given in typed.items():
        line = [sys.executable, "-m", "easytorch", *map(str, given)]
        seconds, processor = [], []
        # The first one, which compiles and fills the page cache, says what is imported and does not count.
        told = subprocess.run([line[0], "-X", "importtime", *line[1:]], env=environment, capture_output=True, text=True)
        for _ in range(repeats):
            shutil.rmtree(scratch / "made", ignore_errors=True)
            begun = time.perf_counter()
            processor.append(processor_seconds(line, environment))
            seconds.append(time.perf_counter() - begun)
        shutil.rmtree(scratch / "made", ignore_errors=True)
        imports = {
            parts[2].strip(): int(parts[1]) / 1e6
            for text in told.stderr.splitlines()
            if len(parts := text.split("|")) == 3 and parts[2].strip() in _HEAVY
        }
        yield {
            "model": name,
            "command": command,
            "seconds": statistics.median(seconds),
            "processor_seconds": statistics.median(processor),
            "imports": imports,
            "start": start,
            "before": _COMMAND_BEFORE[command],
            "bar": _COMMAND_BARS[command],
        }
    shutil.rmtree(torch)
    shutil.rmtree(flax)


def processor_seconds(line: list[str], environment: dict[str, str]) -> float:
    """The CPU time of a process, in user and system mode: the load of other programs does not count."""
    before = os.times()
    subprocess.run(line, env=environment, capture_output=True, check=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def missed(row: dict[str, Any]) -> list[str]:
    """The targets that a row misses."""
    if "command" in row:
        return [f"{row['bar']} s"] if row["processor_seconds"] > row["bar"] else []
    if "VmRSS" in row:
        found = []
        if row["VmRSS"] > 2 * 10**9:
            found.append("2 GB above the start")
        # Code and the threads' own buffers are the same for small models.
        if row["RssAnon"] > 2 * row["largest"] + (64 << 20):
            found.append("anonymous memory of twice the largest tensor")
        return found
    found = [f"{row['bar']} of cp"] if row["of_cp"] < row["bar"] else []
    return [*found, "3 times the naive path"] if row["over_naive"] is not None and row["over_naive"] < 3 else found


def show(row: dict[str, Any]) -> str:
    """A row of a Markdown table."""
    if "command" in row:
        imports = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in row["imports"].items())
        times = f"{row['processor_seconds']:.2f} s / {row['bar']} | {row['seconds']:.2f} s"
        times += f" | {row['start']:.2f} s | {row['before']:.1f} s"
        return f"| {row['model']} | `easytorch {row['command']}` | {times} | {imports} |"
    label = f"| {row['model']} {row['bytes'] / 1e9:.2f} GB | {row['direction']} |"
    if "VmRSS" in row:
        sizes = (row[key] / 1e6 for key in ("largest", "VmRSS", "RssAnon", "RssFile"))
        return label + "".join(f" {size:.0f} MB |" for size in sizes)
    naive = "" if row["over_naive"] is None else f"{row['over_naive']:.1f}"
    times = f" {row['seconds']:.2f} s | {row['cp_seconds']:.2f} s | {row['of_cp']:.2f} / {row['bar']} | {naive} |"
    return label + times


_SPEED_HEAD = (
    "| model | direction | time | cp and sync | of cp's speed / bar | times the naive path |\n|---|---|---|---|---|---|"
)
_COMMANDS_HEAD = (
    "| model | command | processor / bar | time | `python -c pass` | before | imports |\n|---|---|---|---|---|---|---|"
)
_MEMORY_HEAD = (
    "| model | direction | largest tensor | RSS above start | anonymous | mapped files |\n|---|---|---|---|---|---|"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, help="of the model (2GB; 10GB with --rss)")
    parser.add_argument("--only", choices=list(MODELS), help="one of the models")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count (5); the first one more does not")
    parser.add_argument("--naive", action="store_true", help="time the path written by hand too, once")
    parser.add_argument("--rss", action="store_true", help="memory instead of speed")
    parser.add_argument("--commands", action="store_true", help="what the commands take, from their start to their end")
    parser.add_argument("--shard", type=parse_size, default=parse_size("1GB"), help="of shards with --rss (1GB)")
    parser.add_argument("--folder", type=Path, help="where to write: its disk is measured (the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    size = options.size or parse_size("10GB" if options.rss else "1MB" if options.commands else "2GB")
    names = [options.only] if options.only else ["llama", "bert"] if options.rss else list(MODELS)
    head = _MEMORY_HEAD if options.rss else _COMMANDS_HEAD if options.commands else _SPEED_HEAD
    print(f"{installed()}\n\n{head}")
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        for name in names:
            one = (
                memory(name, size, options.shard, Path(scratch))
                if options.rss
                else commands(name, size, options.repeats, Path(scratch))
                if options.commands
                else speed(name, size, options.repeats, options.naive, Path(scratch))
            )
            for row in one:
                rows.append(row)
                print(show(row), *(f"misses {bar}" for bar in missed(row)), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 1 if options.check and any(map(missed, rows)) else 0


def installed() -> str:
    """Versions and machine, for the record."""
    from importlib.metadata import version

    packages = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "numpy", "transformers", "safetensors", "flax")
    )
    system = f"{platform.system()} {platform.release()}, python {platform.python_version()}"
    return f"{os.cpu_count()} processors, {system}, {packages}"


if __name__ == "__main__":
    sys.exit(main())
