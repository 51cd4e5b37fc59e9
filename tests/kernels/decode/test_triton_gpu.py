"""The Triton decode kernels against the definition in float64, on a GPU.

Under TRITON_INTERPRET=1 the same cases run on the CPU; test_triton.py does that in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.decode import triton_op, triton_tuning
from easytorch.kernels.decode.native import decode as definition

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.usefixtures("poisoned_empty"),
]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def heads(b: int = 2, s: int = 200, h: int = 6, k: int = 2, d: int = 60, dv: int | None = None) -> dict[str, Any]:
    return {"query": rand(b, 1, h, d), "key": rand(b, s, k, d), "value": rand(b, s, k, dv or d)}


def chance(share: float, *shape: int) -> torch.Tensor:
    return torch.rand(shape, device=DEVICE) < share


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape, device=DEVICE)


def lengths(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE, dtype=dtype)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": heads,
    "one block": lambda: heads(s=5),
    "no keys": lambda: heads(s=0),
    "mha": lambda: heads(h=3, k=3, s=63),
    "mqa": lambda: heads(h=17, k=1, d=16, dv=40),
    "more heads than a program holds": lambda: heads(b=1, h=70, k=1, d=16, s=63),
    "lengths": lambda: {**heads(b=4), "lengths": lengths(0, 1, 150, 200), "causal": True},
    "window": lambda: {**heads(), "sliding_window": 70, "causal": True},
    "window and lengths": lambda: {
        **heads(b=4), "sliding_window": (33, None), "lengths": lengths(0, 20, 130, 200, dtype=torch.int64),
    },
    "scale and softcap": lambda: {**heads(), "softmax_scale": 0.5, "softcap": 1.5},
    "mask": lambda: {**heads(), "mask": chance(0.5, 2, 6, 1, 200)},
    "mask that hides all": lambda: {
        **heads(), "mask": torch.tensor([True, False], device=DEVICE).reshape(2, 1, 1, 1), "sinks": rand(6),
    },
    "bias": lambda: {**heads(), "bias": rand(6, 1, 200), "mask": chance(0.5, 200)},
    "segments": lambda: {**heads(), "query_segment_ids": ids(2, 1), "key_segment_ids": ids(2, 200)},
    "sinks": lambda: {**heads(), "sinks": rand(6) * 3},
    "sinks of a short cache": lambda: {**heads(s=20), "sinks": torch.cat([rand(5), rand(1) - float("inf")])},
    "everything": lambda: {
        **heads(b=3, dv=33), "mask": chance(0.8, 3, 1, 1, 200), "bias": rand(1, 6, 1, 200), "causal": True,
        "query_segment_ids": ids(3, 1), "key_segment_ids": ids(3, 200), "sliding_window": 120, "softcap": 4.0,
        "sinks": rand(6), "softmax_scale": 0.4, "lengths": lengths(0, 90, 200),
    },
    "strides": lambda: {
        "query": rand(2, 6, 1, 60).transpose(1, 2), "key": rand(2, 2, 100, 60).transpose(1, 2),
        "value": rand(2, 2, 60, 100).permute(0, 3, 1, 2), "sinks": rand(6, 2)[:, 1],
        "lengths": lengths(70, 1, 90, 2)[::2],
    },
}  # fmt: skip


def check(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    floating = {n for n, a in arguments.items() if isinstance(a, torch.Tensor) and a.is_floating_point()}
    given = {n: a.to(dtype) if n in floating else a for n, a in arguments.items()}
    wide = {n: a.double() if n in floating else a for n, a in given.items()}
    expected = definition(**wide)
    if "lengths" in given:  # what lies beyond is not read
        for b, length in enumerate(given["lengths"]):
            given["key"][b, length:] = float("nan")
            given["value"][b, length:] = float("nan")
    with torch.no_grad():
        got = triton_op.decode(**given)
    assert got.dtype == dtype
    assert got.isfinite().all()
    difference, scale = ((t.double()).square().mean().sqrt() for t in (got - expected, expected))
    assert difference <= TOLERANCE[dtype] * scale, f"relative RMS error {float(difference / scale):.2e}"


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("level", [torch.finfo(torch.float32).min, 1e30])
def test_a_bias_as_large_throughout_a_row(level: float, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(triton_op, "splits_of", lambda *_: splits)
    bias = torch.full((2, 1, 1, 1), level, device=DEVICE).expand(2, 6, 1, 150)
    sinks = {} if level != 1e30 else {"sinks": torch.tensor([level] * 3 + [0.0] * 3, device=DEVICE)}
    check({**heads(s=150), "bias": bias, **sinks}, torch.float32)


# one split writes the output itself: the interpreter runs what differs there
WHOLE = ["no keys", "lengths", "mask that hides all", "sinks", "everything"] if INTERPRETED else CASES


@pytest.mark.parametrize(("name", "splits"), [*((name, 3) for name in CASES), *((name, 1) for name in WHOLE)])
def test_float32(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(triton_op, "splits_of", lambda *_: splits)
    check(CASES[name](), torch.float32)


# the interpreter takes seconds a case: of 16 bits it runs those that round differently
@pytest.mark.parametrize("name", ["plain", "everything", "strides"] if INTERPRETED else CASES)
def test_float16(name: str) -> None:
    torch.manual_seed(0)
    check(CASES[name](), torch.float16)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter truncates float32 to bfloat16 where a device rounds")
@pytest.mark.parametrize("name", CASES)
def test_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    check(CASES[name](), torch.bfloat16)


@pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_head_dims_over_long_caches(dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check({**heads(b=2, s=9000, h=8, d=dim), "lengths": lengths(8999, 4000)}, dtype)
    check({**heads(b=2, s=9000, h=32, k=4, d=dim), "sliding_window": 4000, "causal": True}, dtype)


def test_opcheck() -> None:
    given = heads(b=2, s=33, h=2, k=1, d=8)
    operator = torch.ops.easytorch.triton_decode.default
    torch.library.opcheck(operator, (*given.values(), None, *AttentionCall(scale=0.3)), test_utils=CHECKS)
    call = AttentionCall(
        mask=chance(0.5, 33), bias=rand(1, 2, 1, 33), query_segment_ids=ids(2, 1), key_segment_ids=ids(2, 33),
        sinks=rand(2), scale=0.3, left=20, softcap=2.0,
    )  # fmt: skip
    torch.library.opcheck(operator, (*given.values(), lengths(9, 33), *call), test_utils=CHECKS)


# it is not differentiable, and `supports` refuses a call that asks for a gradient
CHECKS = ("test_schema", "test_faketensor")


def test_compiles_to_one_graph() -> None:
    given = {**heads(s=33), "lengths": lengths(9, 33)}
    compiled = torch.compile(triton_op.decode, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**given), triton_op.decode(**given))


def test_the_tables_split_long_caches() -> None:
    assert triton_tuning.splits_of(64, 4096, 64, 132) == 5
    assert triton_tuning.splits_of(8, 131072, 64, 132) == 33
    assert triton_tuning.splits_of(8, 128, 64, 132) == 1
    assert triton_tuning.splits_of(1000, 4096, 64, 132) == 1
