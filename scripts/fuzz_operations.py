"""Bad input for every operation: a call that fits, one argument of it made wrong, on every implementation.

    python scripts/fuzz_operations.py [--seed 0] [--cases 20000] [--only REGEX]

A wrong argument is answered by a `ValueError` or `TypeError` that names it, or by what the definition gives; anything
else is printed, with the seed that makes it again. TRITON_INTERPRET=1 adds the Triton kernels, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from easytorch.kernels.interop.triton_devices import interpreted
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize
from easytorch.operations import (
    OperationImpl,
    OperationMetadata,
    OperationOutput,
    OperationRegistry,
    UnsupportedOperationError,
)
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error

Arguments = dict[str, Any]
# A tensor of another size is wrong beside others: the message may name one of those.
ALSO_NAMED = {"gate": "two floating tensors", "up": "two floating tensors", "latent_pages": "pages"}


class Case(NamedTuple):
    """A call that fits, by name; random: what it draws cannot be compared with another draw."""

    operation: str
    arguments: Arguments


@functools.cache
def cases() -> list[Case]:
    """Every operation, some of them in several calls that together give every argument."""
    return [Case(name, arguments) for name, make in MAKERS for arguments in make()]


def _r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _attention(length: int = 6, keys: int = 8) -> Arguments:
    return {"query": _r(2, length, 4, 16), "key": _r(2, keys, 2, 16, seed=1), "value": _r(2, keys, 2, 12, seed=2)}


def _features(length: int = 6, keys: int = 8) -> Arguments:
    return {
        "causal": True, "mask": _r(2, 1, length, keys, seed=3) > -1, "bias": _r(2, 1, length, keys, seed=4),
        "query_segment_ids": torch.tensor([[0] * (length // 2) + [1] * (length - length // 2)] * 2),
        "key_segment_ids": torch.tensor([[0] * (keys // 2) + [1] * (keys - keys // 2)] * 2), "sliding_window": (4, 2),
        "softmax_scale": 0.3,
    }  # fmt: skip


def attention_calls() -> Iterator[Arguments]:
    yield {**_attention(), **_features()}
    yield {**_attention(8), "causal": True, "softcap": 4.0, "sinks": _r(4, seed=5), "sliding_window": 5}
    yield {**_attention(), "dropout_prob": 0.5, "seed": 7, "mask": _r(6, 8, seed=3) > -1}


def sdpa_calls() -> Iterator[Arguments]:
    yield {**_attention(), **_features()}
    yield {**_attention(8), "causal": True, "sliding_window": 5}


def large_attention_calls() -> Iterator[Arguments]:
    """Sizes that choose other implementations."""
    tensors = {n: t.repeat(1, 64, 1, 1) for n, t in _attention(8).items()}
    yield {**tensors, "causal": True, "sliding_window": 100, "softcap": 4.0}
    yield {**tensors, "causal": True, "sliding_window": (100, None), "mask": _r(512, 512) > -1}


def blocksparse_calls() -> Iterator[Arguments]:
    yield from attention_calls()
    yield {**_attention(8), "causal": True, "chunk_size": 4}
    yield {**_attention(8), "causal": True, "prefix_length": 3}
    yield {**_attention(8), "causal": True, "prefix_length": torch.tensor([3, 1])}


def flash_calls() -> Iterator[Arguments]:
    yield from attention_calls()
    tokens = {n: t[:1] for n, t in _attention(8).items()}
    ends = torch.tensor([0, 3, 7])
    yield {
        **tokens, "causal": True, "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 4, "max_seqlen_k": 4,
        "sliding_window": (4, 2),
    }  # fmt: skip


def ring_calls() -> Iterator[Arguments]:
    yield from attention_calls()
    yield {**_attention(8), "causal": True, "layout": "zigzag"}


def decode_calls() -> Iterator[Arguments]:
    lengths = torch.tensor([3, 8])
    yield {**_attention(1), "lengths": lengths, "causal": True, "sliding_window": 4, "softcap": 3.0, "sinks": _r(4)}
    yield {**_attention(1), "lengths": lengths.int(), "mask": _r(2, 1, 1, 8) > -1, "bias": _r(2, 4, 1, 8)}
    yield {**_attention(1), "dropout_prob": 0.5, "seed": 3, "softmax_scale": 0.2}


def _pages() -> Arguments:
    return {
        "context_lens": torch.tensor([16, 9]), "block_tables": torch.tensor([[2, 0], [1, 3]]),
        "query_start_loc": torch.tensor([0, 5, 6]), "num_seqs": 2,
    }  # fmt: skip


def ragged_calls() -> Iterator[Arguments]:
    tensors = {"query": _r(6, 4, 16), "key_pages": _r(4, 8, 2, 16, seed=1), "value_pages": _r(4, 8, 2, 12)}
    yield {**tensors, **_pages(), "causal": True, "sliding_window": 5, "softcap": 3.0, "sinks": _r(4)}
    yield {**tensors, **_pages(), "num_seqs": torch.tensor(2), "softmax_scale": 0.3}


def _latent(*shape: int, keys: int = 8) -> Arguments:
    return {
        "query": _r(*shape, 3, 16), "query_rope": _r(*shape, 3, 8, seed=1), "up_key": _r(3, 16, 24, seed=4),
        "up_value": _r(3, 20, 24, seed=5),
    }  # fmt: skip


def multi_latent_calls() -> Iterator[Arguments]:
    cached = {"latent": _r(2, 8, 24, seed=2), "key_rope": _r(2, 8, 8, seed=3)}
    yield {**_latent(2, 6), **cached, **_features()}
    yield {**_latent(2, 1), **cached, "softcap": 3.0, "sinks": _r(3), "causal": True, "sliding_window": 4}


def ragged_multi_latent_calls() -> Iterator[Arguments]:
    yield {
        **_latent(6), "latent_pages": _r(4, 8, 32, seed=2), **_pages(), "softcap": 3.0, "sinks": _r(3),
        "sliding_window": 5,
    }  # fmt: skip


def rotary_calls() -> Iterator[Arguments]:
    heads, angles = {"query": _r(2, 6, 4, 16), "key": _r(2, 6, 2, 16, seed=1)}, _r(9, 4, seed=3).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    yield {**heads, "cos": cos[:6].repeat(2, 1, 1), "sin": sin[:6].repeat(2, 1, 1), "interleaved": False}
    ids = torch.tensor([[3, 4, 5, 6, 7, 8], [0, 0, 2, 2, 1, 1]])
    yield {**heads, "cos": cos, "sin": sin, "position_ids": ids, "interleaved": True}
    yield {**heads, "cos": cos, "sin": sin, "offset": 2}


def loss_calls() -> Iterator[Arguments]:
    labels = torch.tensor([0, 3, -100, 15, 7])
    yield {"logits": _r(5, 16), "labels": labels, "label_smoothing": 0.1, "ignore_index": -100, "reduction": "sum"}
    yield {"logits": _r(5, 16), "labels": labels.int(), "softcap": 3.0, "z_loss": 0.1, "reduction": "none"}
    yield {"logits": _r(5, 16), "labels": labels}


def fused_loss_calls() -> Iterator[Arguments]:
    labels, linear = torch.tensor([0, 3, -100, 15, 7]), {"hidden": _r(5, 8), "weight": _r(16, 8), "bias": _r(16)}
    yield {**linear, "labels": labels, "label_smoothing": 0.1, "ignore_index": -100, "reduction": "sum"}
    yield {**linear, "labels": labels, "softcap": 3.0, "z_loss": 0.1, "reduction": "none", "chunk_size": 2}
    yield {**linear, "labels": labels, "chunk_size": 3}


def quantized_calls() -> Iterator[Arguments]:
    for kind in ("int8", "int4", "nf4", "fp4_e2m1", "fp8_e4m3fn", "fp8_e5m2"):
        yield {"x": _r(3, 64), "weight": quantize(_r(24, 64, seed=1), kind), "bias": _r(24)}


def conv_calls() -> Iterator[Arguments]:
    yield {
        "x": _r(2, 9, 6), "weight": _r(6, 4), "bias": _r(6), "initial_state": _r(2, 6, 3), "activation": "silu",
        "segment_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2]] * 2),
    }  # fmt: skip


def ssm1_calls() -> Iterator[Arguments]:
    for length in (1, 9, 20):
        x = _r(2, length, 6)
        yield {
            "x": x, "dt": x.abs(), "A": -_r(6, 4).abs(), "B": _r(2, length, 4, seed=1), "C": _r(2, length, 4, seed=2),
            "D": _r(6), "z": x, "dt_bias": _r(6), "dt_softplus": True, "initial_state": _r(2, 6, 4),
            "segment_ids": torch.arange(length).div(4, rounding_mode="floor").expand(2, length),
        }  # fmt: skip


def ssm2_calls() -> Iterator[Arguments]:
    for length in (1, 9):
        x = _r(2, length, 6, 5)
        yield {
            "x": x, "dt": x[..., 0].abs(), "A": -_r(6).abs(), "B": _r(2, length, 2, 4, seed=1),
            "C": _r(2, length, 2, 4, seed=2), "D": _r(6), "z": x, "dt_bias": _r(6), "dt_softplus": True,
            "dt_limit": (0.1, 2.0), "initial_state": _r(2, 6, 5, 4),
            "segment_ids": torch.arange(length).div(4, rounding_mode="floor").expand(2, length),
        }  # fmt: skip


def delta_calls() -> Iterator[Arguments]:
    for length in (1, 9):
        yield {
            "query": _r(2, length, 2, 8), "key": _r(2, length, 2, 8, seed=1), "value": _r(2, length, 4, 6, seed=2),
            "g": -_r(2, length, 4).abs(), "beta": _r(2, length, 4).sigmoid(), "initial_state": _r(2, 4, 8, 6),
            "use_qk_l2norm": True, "softmax_scale": 0.3,
            "segment_ids": torch.arange(length).div(4, rounding_mode="floor").expand(2, length),
        }  # fmt: skip


MAKERS: list[tuple[str, Callable[[], Any]]] = [
    ("attention", attention_calls),
    ("attention", large_attention_calls),
    ("attention", lambda: [{**_attention(8), "chunk_size": 4}, {**_attention(1), "causal": True}]),
    ("vanilla", attention_calls),
    ("sdpa", sdpa_calls),
    ("flash", flash_calls),
    ("blocksparse", blocksparse_calls),
    ("ring", ring_calls),
    ("decode", decode_calls),
    ("ragged_page_attention", ragged_calls),
    ("multi_latent_attention", multi_latent_calls),
    ("ragged_page_multi_latent_attention", ragged_multi_latent_calls),
    ("rms_norm", lambda: [{"x": _r(3, 16), "weight": _r(16), "eps": 1e-6}]),
    ("layer_norm", lambda: [{"x": _r(3, 16), "weight": _r(16), "bias": _r(16), "eps": 1e-5}]),
    ("swiglu", lambda: [{"gate": _r(3, 16), "up": _r(3, 16, seed=1)}]),
    ("geglu", lambda: [{"gate": _r(3, 16), "up": _r(3, 16, seed=1), "approximate": "tanh"}]),
    ("rotary", rotary_calls),
    ("cross_entropy", loss_calls),
    ("fused_linear_cross_entropy", fused_loss_calls),
    ("linear", lambda: [{"x": _r(3, 8), "weight": _r(5, 8), "bias": _r(5)}]),
    (
        "grouped_matmul",
        lambda: [
            {"x": _r(11, 8), "weight": _r(3, 8, 12), "group_sizes": torch.tensor([4, 0, 6]), "bias": _r(3, 12)},
            {"x": _r(11, 8), "weight": _r(3, 12, 8), "group_sizes": torch.tensor([4, 0, 6]), "transposed": True},
        ],
    ),
    ("quantized_matmul", quantized_calls),
    ("causal_conv1d", conv_calls),
    ("ssm1", ssm1_calls),
    ("ssm2", ssm2_calls),
    ("gated_delta_rule", delta_calls),
]


def implementations(name: str) -> list[str | None]:
    """The implementations that can be forced for tensors on the CPU, and None for the automatic choice."""
    operation = OperationRegistry.create(name)
    found: list[str | None] = [None]
    for backend in operation.backends():
        if backend == "native" or operation.path("cpu")[1] == backend or operation.emulates(backend, "cpu"):
            found.append(backend)
    if name == "attention":
        found += ["flash:aten", "flash:cpu", "blocksparse:aten", "sdpa:aten", "flash:xla"]
    return found


def wrong(value: Any, rng: random.Random) -> tuple[str, Any]:
    """Something else in place of `value`, and what it is."""
    change, make = rng.choice(_tensor_changes(value) if isinstance(value, Tensor) else _plain_changes(value))
    return change, make(value, rng)


Change = tuple[str, Callable[[Any, random.Random], Any]]


def _tensor_changes(value: Tensor) -> list[Change]:
    changes: list[Change] = [
        ("on meta", lambda x, _: x.to("meta")),
        ("None", lambda x, _: None),
        ("a number", lambda x, rng: rng.choice([0, 1, 2.5])),
        ("a list", lambda x, _: x.tolist()),
        ("a string", lambda x, _: "tensor"),
        ("one dimension more", lambda x, rng: x.unsqueeze(rng.randint(0, x.dim()))),
        ("complex", lambda x, _: x.to(torch.complex64)),
        ("another dtype", lambda x, rng: x.to(rng.choice([torch.bfloat16, torch.float64, torch.float16]))),
        ("integers", lambda x, rng: x.to(rng.choice([torch.int64, torch.int32, torch.uint8]))),
        ("booleans", lambda x, _: x.to(torch.bool)),
        ("float8", lambda x, _: x.to(torch.float32).to(torch.float8_e4m3fn)),
        ("strided", _strided),
        ("no elements", lambda x, _: x.new_empty(0)),
    ]
    if value.dim():
        changes += [
            ("one dimension less", lambda x, rng: x.select(rng.randrange(x.dim()), 0)),
            ("flat", lambda x, _: x.reshape(-1)),
            ("shorter", lambda x, rng: _narrowed(x, rng, 1)),
            ("longer", _longer),
            ("empty", lambda x, rng: _narrowed(x, rng, None)),
            ("transposed", lambda x, rng: x.transpose(*rng.choices(range(x.dim()), k=2))),
        ]
    if value.dtype in (torch.int32, torch.int64) and value.numel():
        changes += [("out of range", _out_of_range)] * 6
    return changes


def _strided(x: Tensor, rng: random.Random) -> Tensor:
    """The same numbers, apart from one another."""
    return torch.stack([x, x.new_zeros(x.shape)], -1)[..., 0]


def _narrowed(x: Tensor, rng: random.Random, by: int | None) -> Tensor:
    dim = rng.randrange(x.dim())
    return x.narrow(dim, 0, 0 if by is None else max(0, x.shape[dim] - by))


def _longer(x: Tensor, rng: random.Random) -> Tensor:
    dim = rng.randrange(x.dim())
    return torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim)


def _out_of_range(x: Tensor, rng: random.Random) -> Tensor:
    x = x.clone()
    x.view(-1)[rng.randrange(x.numel())] = rng.choice([-1, -7, 17, 1000, 2**31 - 1])
    return x


def _plain_changes(value: Any) -> list[Change]:
    found: list[Any] = [None, "no", [1], {}, object(), (1, 2, 3), math.nan, torch.tensor(1.5)]
    if isinstance(value, bool):
        found += [0, 1, not value, torch.tensor(True)]
    elif isinstance(value, int | float | tuple):
        found += [-1, -0.5, 0, 3.5, math.inf, -math.inf, 1e30, 2**40, True, (2, 1), (1.5, 1), (-3, 0), (math.nan, 1.0)]
        found += [torch.tensor(1, device="meta"), 1 + 1j]
    elif isinstance(value, str):
        found += [0, True, value.upper()]
    elif isinstance(value, QuantizedWeight):
        found += [value.to("meta"), value.dequantize()]
    return [(repr(x) if len(repr(x)) < 60 else type(x).__name__, lambda _, rng, x=x: x) for x in found]


class Failure(NamedTuple):
    operation: str
    implementation: str | None
    argument: str
    change: str
    what: str

    def __str__(self) -> str:
        return f"{self.operation} [{self.implementation}] {self.argument}: {self.change}: {self.what}"


def attempt(case: Case, argument: str, changed: Any, change: str) -> Iterator[Failure]:
    """The call with `argument` changed, on every implementation; what is neither refused nor the definition's."""
    given = {**case.arguments, argument: changed}
    expected = run(case.operation, "native", given)
    for implementation in implementations(case.operation):
        if not carries(case, implementation):
            continue
        got = expected if implementation == "native" else run(case.operation, implementation, given)
        what = _problem(case, argument, change, got, expected)
        if what is not None:
            yield Failure(case.operation, implementation, argument, change, what)


_carried: dict[tuple[int, str | None], bool] = {}


def carries(case: Case, implementation: str | None) -> bool:
    """Whether the implementation takes the call as it is."""
    key = id(case.arguments), implementation
    if key not in _carried:
        _carried[key] = not isinstance(run(case.operation, implementation, case.arguments), Exception)
    return _carried[key]


def run(name: str, backend: str | None, given: Arguments) -> Any:
    """The tensors of the result, or the exception."""
    operation: OperationImpl = OperationRegistry.create(name, OperationMetadata(backend=backend))
    try:
        with torch.no_grad():
            result = operation(**given)
    except Exception as error:
        return error
    if isinstance(result, OperationOutput):
        # which path returns the weights too is its own affair
        result = [x for n, x in result.to_dict().items() if n != "attention_weights" and x is not None]
    return list(result) if isinstance(result, list | tuple) else [result]


def _problem(case: Case, argument: str, change: str, got: Any, expected: Any) -> str | None:
    if isinstance(got, Exception):
        if not isinstance(got, ValueError | TypeError):
            return f"{type(got).__name__}: {str(got)[:200]}"
        if isinstance(case.arguments[argument], Tensor) and isinstance(got, UnsupportedOperationError):
            return None  # a forced backend, and tensors that seem to be elsewhere, or are not of its dtype
        named = [argument]
        if isinstance(case.arguments[argument], Tensor):
            named += [
                *(n for n, x in case.arguments.items() if isinstance(x, Tensor)),
                ALSO_NAMED.get(argument, argument),
            ]
        return None if any(name in str(got) for name in named) else f"unnamed {type(got).__name__}: {str(got)[:200]}"
    if any(x.device.type != "cpu" for x in got):
        return "a result on another device"
    if isinstance(expected, Exception):
        return f"a result, where the definition raises {type(expected).__name__}: {str(expected)[:100]}"
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape:
            return f"shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        if argument == "seed":
            continue
        if not torch.equal(a.isnan(), b.isnan()):
            return "NaN in other places than the definition's"
        error = relative_rms_error(*(x.double().masked_fill(x.isnan(), 0.0) for x in (a, b)))
        if error > 2 * TOLERANCE.get(a.dtype, 0.0):
            return f"relative RMS error {error:.2g}"
    return None


def sample(seed: int, count: int, only: str = "") -> Iterator[Failure]:
    """`count` changed calls, every operation as often as the others; the seed makes them again."""
    rng, found = random.Random(seed), [case for case in cases() if re.search(only, case.operation)]
    names = sorted({case.operation for case in found})
    assert names, f"no operation matches {only!r}"
    for index in range(count):
        name = names[index % len(names)]
        case = rng.choice([case for case in found if case.operation == name])
        argument = rng.choice(list(case.arguments))
        change, changed = wrong(case.arguments[argument], rng)
        yield from attempt(case, argument, changed, change)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--only", default="", help="a regular expression of operations")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    seen: dict[tuple[str, ...], int] = {}
    for failure in sample(given.seed, given.cases, given.only):
        key = (failure.operation, str(failure.implementation), failure.argument, failure.change, failure.what[:60])
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == 1:
            print(failure, flush=True)
    print(f"seed {given.seed}: {given.cases} calls, {len(seen)} kinds of failure; triton {interpreted()}")
    return int(bool(seen))


if __name__ == "__main__":
    sys.exit(main())
