"""The cases of scripts/bench_generation.py beside its table of decode and prefill: each measures programs in turns."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from generation.requests import AFTER_CONTEXT, WORK

FIRST_TOKEN = Path(__file__).resolve().parent / "first_token.py"
ROOT = Path(__file__).resolve().parents[2]
CONTEXTS = (8192, 32768)
# of a long context: attention grows with it, weights do not
LONG_LAYERS = 2


class Found(NamedTuple):
    """A case: program -> the seconds of each round; the first is compared with the others. tokens: new, in all."""

    what: str
    seconds: dict[str, list[float]]
    tokens: int

    def markdown(self) -> str:
        ours, *_ = self.seconds
        lines = [self.what, "", f"| program | seconds | tokens/s | {ours} is faster by |", "|---|---|---|---|"]
        for name, found in self.seconds.items():
            median = statistics.median(found)
            ratios = [one / base for one, base in zip(found, self.seconds[ours], strict=True)]
            by = "" if name == ours else f"{statistics.median(ratios):.2f}"
            lines.append(f"| {name} | {median:.2f} | {self.tokens / median:.1f} | {by} |")
        return "\n".join(lines) + "\n"


class Setting(NamedTuple):
    """model: the folder of a checkpoint with a tokenizer. start: a worker of a program. gguf: its file."""

    options: argparse.Namespace
    dtype: str
    model: Path
    start: Callable[[str, Path], Any]
    gguf: Callable[[], Path]


def in_turns(asks: Mapping[str, Callable[[], float]], rounds: int, what: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in asks}
    for number in range(rounds):
        for name in list(asks)[:: 1 if number % 2 else -1]:
            found[name].append(asks[name]())
            print(f"{what}: round {number + 1} of {rounds}, {name} {found[name][-1]:.2f} s", file=sys.stderr)
    return found


@contextmanager
def workers(setting: Setting, programs: Mapping[str, tuple[str, Path]]) -> Iterator[dict[str, Any]]:
    started: dict[str, Any] = {}
    try:
        for name, (program, model) in programs.items():
            started[name] = setting.start(program, model)
        yield started
    finally:
        for one in started.values():
            one.close()


def of_requests(
    setting: Setting, case: str, programs: dict[str, tuple[str, Path]], what: str, warm: int
) -> Iterator[Found]:
    """The seconds of all requests of a case; warm: how many are run before anything is timed."""
    options = setting.options
    with workers(setting, programs) as started:
        for one in started.values():
            one.ask(case, warm)
        asks = {name: lambda one=one: one.ask(case, options.requests) for name, one in started.items()}
        seconds = in_turns(asks, options.rounds, f"{case} {setting.dtype}")
    work = WORK[case](options.requests, small=options.quick)
    given, new = sum(len(one.prompt) for one in work), sum(one.new for one in work)
    yield Found(f"{what}, {setting.dtype}: {given} tokens of prompts, {new} new ones", seconds, new)


def batch(setting: Setting) -> Iterator[Found]:
    """Requests of mixed lengths: our engine, transformers' continuous batching, llama.cpp's batches."""
    programs, chosen = {"engine": ("engine", setting.model)}, setting.options.programs
    if "transformers" in chosen:
        programs["continuous batching"] = ("continuous-batching", setting.model)
    if "llama.cpp" in chosen:
        programs["llama.cpp"] = ("llama.cpp-slots", setting.gguf())
    yield from of_requests(setting, "batch", programs, f"{setting.options.requests} requests", 2)


def prefix(setting: Setting) -> Iterator[Found]:
    """Requests that share their first tokens: with and without reuse of them."""
    programs = {"engine": ("engine", setting.model), "without reuse": ("engine-without-reuse", setting.model)}
    yield from of_requests(setting, "prefix", programs, f"{setting.options.requests} requests with one prefix", 1)


def server(setting: Setting) -> Iterator[Found]:
    """The same requests over HTTP, complete and streamed."""
    programs = {
        "engine": ("engine-without-reuse", setting.model), "server": ("server", setting.model),
        "server, streams": ("server-streams", setting.model),
    }  # fmt: skip
    what = f"{setting.options.requests} requests to a server"
    yield from of_requests(setting, "server", programs, what, 2)


def long(setting: Setting) -> Iterator[Found]:
    """Decoding after a long context, by a model of few layers."""
    programs = {
        name: (name, setting.model) for name in ("easytorch", "transformers") if name in setting.options.programs
    }
    if "llama.cpp" in setting.options.programs:
        programs["llama.cpp"] = ("llama.cpp", setting.gguf())
    for context in setting.options.contexts:
        with workers(setting, programs) as started:
            for one in started.values():
                one.ask("long", context)
            asks = {name: lambda one=one, n=context: one.ask("long", n) for name, one in started.items()}
            seconds = in_turns(asks, setting.options.rounds, f"{context} {setting.dtype}")
        what = f"{AFTER_CONTEXT} tokens after a context of {context}, {LONG_LAYERS} layers, {setting.dtype}"
        yield Found(what, seconds, AFTER_CONTEXT)


def first_token(setting: Setting) -> Iterator[Found]:
    """`easytorch generate` until its first token, and a process that loads the model and runs the prompt once."""
    prompt = " ".join(f"w{number}" for number in range(3, 4 if setting.options.quick else 259))
    threads = str(setting.options.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    alone = [sys.executable, str(FIRST_TOKEN), str(setting.model), prompt, setting.dtype]
    command = [sys.executable, "-m", "easytorch", "generate", str(setting.model), "--prompt", prompt]
    command += ["--dtype", setting.dtype, "--max-new-tokens", "8"]

    def seconds(arguments: list[str], skipped: int) -> float:
        """Until more than `skipped` bytes were written."""
        start = time.perf_counter()
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
            assert process.stdout is not None
            if len(process.stdout.read(skipped + 1)) <= skipped:
                raise SystemExit(f"{' '.join(arguments[:4])} ended with status {process.wait()} before a token")
            return time.perf_counter() - start

    asks = {"generate": lambda: seconds(command, len(prompt.encode()) + 1), "load + prefill": lambda: seconds(alone, 0)}
    for ask in asks.values():  # compiles kernels, and fills the cache of files
        ask()
    what = f"The first token after a prompt of {len(prompt.split())}, from the start of the process, {setting.dtype}"
    yield Found(what, in_turns(asks, setting.options.rounds, f"first token {setting.dtype}"), 1)


CASES: dict[str, Callable[[Setting], Iterator[Found]]] = {
    "batch": batch, "prefix": prefix, "server": server, "long": long, "first-token": first_token,
}  # fmt: skip
