"""The backends and the torch front-end against their alternatives: jax, torch eager, torch.compile.

    python scripts/bench_backends.py [--only block,bf16,compile,growth,call] [--repeats 15] [--threads 2] [--check]

block    a 4-layer Llama-like block (hidden 1024, 256 tokens), fp32, through the front-end on xla; the same in jax
bf16     the same module in bfloat16 against torch eager
compile  from the module to the first result, caches off
growth   build and compile of 10, 100, 1,000 and 10,000 operations
call     a call of a compiled program of one small addition against a call of the jitted function

Candidates take turns in one process; medians. `--check` exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compile times are those of a first compilation.
os.environ["EASYTORCH_XLA_CACHE"] = ""
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402

from easytorch import backends, frontend  # noqa: E402

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, LENGTH = 4, 1024, 16, 8, 2816, 256
SIZE = HIDDEN // HEADS
EPSILON = 1e-6
COUNTS = (10, 100, 1_000, 10_000)


class Attention(torch.nn.Module):
    """Grouped-query attention with rotary positions, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.query = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key = torch.nn.Linear(HIDDEN, KV_HEADS * SIZE, bias=False)
        self.value = torch.nn.Linear(HIDDEN, KV_HEADS * SIZE, bias=False)
        self.output = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape

        def heads(projection: torch.nn.Linear) -> torch.Tensor:
            return projection(x).view(batch, length, -1, SIZE).transpose(1, 2)

        def rotate(t: torch.Tensor) -> torch.Tensor:
            first, second = t.chunk(2, dim=-1)
            return t * cos + torch.cat([-second, first], dim=-1) * sin

        mixed = torch.nn.functional.scaled_dot_product_attention(
            rotate(heads(self.query)), rotate(heads(self.key)), heads(self.value), is_causal=True, enable_gqa=True
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, HIDDEN))


class Layer(torch.nn.Module):
    """Attention and SwiGLU, each after an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.rand(HIDDEN) + 0.5) for _ in range(2))
        self.attention = Attention()
        self.gate = torch.nn.Linear(HIDDEN, INNER, bias=False)
        self.up = torch.nn.Linear(HIDDEN, INNER, bias=False)
        self.down = torch.nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(norm(x, self.first), cos, sin)
        inner = norm(x, self.second)
        return x + self.down(torch.nn.functional.silu(self.gate(inner)) * self.up(inner))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm in float32, as transformers' Llama has it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


class Sum(torch.nn.Module):
    """One addition: measures call overhead."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Block(torch.nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


def jax_block(module: Block) -> tuple[Callable[..., Any], Any]:
    """`Block` as one writes it in jax, matrices (in, out), and its weights."""
    import jax
    import jax.numpy as jnp

    def rms(x: Any, weight: Any) -> Any:
        return weight * (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON))

    def layer(x: Any, w: Mapping[str, Any], cos: Any, sin: Any) -> Any:
        normed = rms(x, w["first"])

        def heads(weight: Any) -> Any:
            return (normed @ weight).reshape(1, LENGTH, -1, SIZE)

        def rotate(t: Any) -> Any:
            first, second = jnp.split(t, 2, -1)
            return t * cos[:, None] + jnp.concatenate([-second, first], -1) * sin[:, None]

        query, key = rotate(heads(w["query"])), rotate(heads(w["key"]))
        mixed = jax.nn.dot_product_attention(query, key, heads(w["value"]), is_causal=True)
        x = x + mixed.reshape(1, LENGTH, HIDDEN) @ w["output"]
        inner = rms(x, w["second"])
        return x + (jax.nn.silu(inner @ w["gate"]) * (inner @ w["up"])) @ w["down"]

    def block(weights: Any, x: Any, cos: Any, sin: Any) -> Any:
        for w in weights:
            x = layer(x, w, cos, sin)
        return x

    def array(tensor: torch.Tensor) -> Any:
        return jnp.asarray(tensor.detach().numpy().T.copy())

    weights = [
        {
            "first": array(one.first),
            "second": array(one.second),
            **{name: array(getattr(one.attention, name).weight) for name in ("query", "key", "value", "output")},
            **{name: array(getattr(one, name).weight) for name in ("gate", "up", "down")},
        }
        for one in module.layers
    ]
    tables = jnp.asarray(module.cos.numpy()), jnp.asarray(module.sin.numpy())  # type: ignore[operator, union-attr]
    jitted = jax.jit(block)
    return lambda x: jitted(weights, x, *tables), jnp.asarray


def timed(candidates: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each, in turns of changing order.

    Each turn is a call that does not count and one that does: the caches, and threads that wait actively for more work
    (OpenMP's), are then those of the candidate itself and not of the one before it.
    """
    order = list(candidates)
    shuffle = random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            candidates[name]()
            start = time.perf_counter()
            candidates[name]()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


class Report:
    """Lines of the table, and the targets that were missed."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def line(self, what: str, seconds: float, note: str = "") -> None:
        print(f"{what:<44} {seconds * 1e3:12.3f} ms  {note}", flush=True)

    def bar(self, what: str, share: float, limit: float) -> None:
        verdict = "ok" if share <= limit else "MISSED"
        print(f"{what:<44} {share:12.3f} x   (bar {limit}) {verdict}", flush=True)
        if share > limit:
            self.missed.append(what)


def bench_block(report: Report, repeats: int) -> None:
    """A transformer block in float32."""
    module = Block().eval()
    x = torch.randn(1, LENGTH, HIDDEN)
    ours = frontend.compile(module, (x,))
    in_jax, to_jax = jax_block(module)
    jax_x = to_jax(x.numpy())
    inductor = torch.compile(module)
    with torch.no_grad():
        wanted = module(x)
        for name, got in {"easytorch": ours(x), "jax": torch.from_numpy(np.array(in_jax(jax_x)))}.items():
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        candidates = {
            "easytorch on xla": lambda: ours(x),
            "jax.jit": lambda: in_jax(jax_x).block_until_ready(),
            "torch eager": lambda: module(x),
            "torch.compile (inductor)": lambda: inductor(x),
        }
        seconds = timed(candidates, repeats)
    for name, value in seconds.items():
        report.line(f"block fp32: {name}", value)
    mine = seconds["easytorch on xla"]
    report.bar("block fp32: against jax.jit", mine / seconds["jax.jit"], 1.05)
    report.bar("block fp32: against torch eager", mine / seconds["torch eager"], 0.6)
    report.bar("block fp32: against torch.compile", mine / seconds["torch.compile (inductor)"], 0.6)


def bench_bf16(report: Report, repeats: int) -> None:
    """bfloat16 on the default backend."""
    module = Block().eval().bfloat16()
    x = torch.randn(1, LENGTH, HIDDEN).bfloat16()
    ours = frontend.compile(module, (x,))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), module(x), rtol=0.1, atol=0.1)
        seconds = timed({"easytorch": lambda: ours(x), "torch eager": lambda: module(x)}, repeats)
    for name, value in seconds.items():
        report.line(f"block bf16: {name}", value, ours.backend.name if name == "easytorch" else "")
    report.bar("block bf16: against torch eager", seconds["easytorch"] / seconds["torch eager"], 1.0)


def bench_compile(report: Report, repeats: int) -> None:
    """The time to the first result."""
    module = Block().eval()
    x = torch.randn(1, LENGTH, HIDDEN)
    with torch.no_grad():
        # Imports and the start of the client are not compilation.
        tiny = torch.nn.Linear(2, 2)
        frontend.compile(tiny, (torch.ones(1, 2),))(torch.ones(1, 2))
        torch.compile(tiny)(torch.ones(1, 2))
        start = time.perf_counter()
        frontend.compile(module, (x,))(x)
        ours = time.perf_counter() - start
        torch._dynamo.reset()
        start = time.perf_counter()
        torch.compile(module)(x)
        theirs = time.perf_counter() - start
    report.line("first compile: easytorch on xla", ours)
    report.line("first compile: torch.compile", theirs)
    report.bar("first compile: against torch.compile", ours / theirs, 1.0)


def bench_growth(report: Report, repeats: int) -> None:
    """A chain of products, sums and functions with weights of their own, as layers are."""
    shape = backends.make_shape("float32", 16, 16)
    # What stands around is not to be searched for garbage again and again.
    gc.collect()
    gc.freeze()
    for name in ("xla", "torch", "numpy"):
        backend = backends.new(name)
        each = []
        for count in COUNTS:
            start = time.perf_counter()
            builder = backend.builder(f"chain{count}")
            x = builder.parameter("x", shape)
            for number in range(count):
                turn = number % 4
                if turn == 0:
                    weight = builder.parameter(f"weight{number}", shape)
                    x = builder.dot_general(x, (1,), (), weight, (0,), ())
                elif turn == 2:
                    x = builder.tanh(x)
                else:
                    x = builder.add(x, weight)
            built = time.perf_counter() - start
            builder.compile(x)
            total = time.perf_counter() - start
            each.append(total / count)
            share = f"build {built * 1e3:.3f} ms, {each[-1] * 1e6:.1f} us an operation"
            report.line(f"growth {name}: {count} operations", total, share)
        report.bar(f"growth {name}: an operation at 10,000 to 1,000", each[-1] / each[-2], 1.5)
    gc.unfreeze()


def bench_call(report: Report, repeats: int) -> None:
    """The overhead of a call."""
    import jax

    backend = backends.new("xla")
    builder = backend.builder("add")
    x = builder.parameter("x", backends.make_shape("float32", 8))
    y = builder.parameter("y", backends.make_shape("float32", 8))
    executable = builder.compile(builder.add(x, y))
    values = np.ones(8, np.float32)
    buffers = [backend.buffer_from_numpy(values.copy()) for _ in range(2)]
    jitted = jax.jit(lambda one, other: one + other)
    arrays = [jax.numpy.asarray(values) for _ in range(2)]
    tensor = torch.ones(8)
    compiled = frontend.compile(Sum(), (tensor, tensor))
    calls = 500

    def many(run: Callable[[], Any]) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(calls):
                run()

        return loop

    candidates = {
        "executable.execute": many(lambda: executable.execute(buffers)),
        "jax.jit": many(lambda: jitted(*arrays)),
        "a compiled module, torch to torch": many(lambda: compiled(tensor, tensor)),
    }
    seconds = {name: value / calls for name, value in timed(candidates, repeats).items()}
    for name, value in seconds.items():
        report.line(f"call: {name}", value, f"{value * 1e6:.2f} us")
    report.bar("call: against jax.jit", seconds["executable.execute"] / seconds["jax.jit"], 1.5)


BENCHES = {
    "block": bench_block,
    "bf16": bench_bf16,
    "compile": bench_compile,
    "growth": bench_growth,
    "call": bench_call,
}


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", default=",".join(BENCHES), help="which, by commas")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    chosen = given.only.split(",")
    unknown = [name for name in chosen if name not in BENCHES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    import jax

    print(f"torch {torch.__version__}, jax {jax.__version__}, {given.threads} threads of {os.cpu_count()}, ", end="")
    print(f"medians of {given.repeats} in turns")
    report = Report()
    for name in chosen:
        BENCHES[name](report, given.repeats)
    if report.missed:
        print(f"missed: {', '.join(report.missed)}")
    return int(given.check and bool(report.missed))


if __name__ == "__main__":
    sys.exit(main())
