"""A sample of scripts/sweep_attention.py, and calls that the automatic choice answers with each implementation."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from easytorch.kernels.cpu import library, processor
from easytorch.operations import OperationMetadata, OperationRegistry, UnsupportedOperationError

ROOT = Path(__file__).parents[2]
SEED = 20


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sweep_attention", ROOT / "scripts" / "sweep_attention.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sweep = _load()


@pytest.mark.parametrize("first", range(0, 160, 40))
def test_small_calls_of_every_layout(first: int) -> None:
    for number in range(first, first + 40):
        case = sweep.draw(SEED, number, small=True)
        problems = sweep.check(case, seed=number).problems
        assert not problems, f"--small --seed {SEED} --only {number}: {case}\n" + "\n".join(problems)


def test_no_implementation_reads_beyond_a_tensor() -> None:
    """Every tensor ends where a page ends that may not be read: in a process of its own, which that would end."""
    command = [sys.executable, str(ROOT / "scripts/sweep_attention.py"), "--guard", "--small", "--cases", "60"]
    run = subprocess.run([*command, "--seed", "21"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, f"{run.returncode}\n{run.stdout}\n{run.stderr}"


def _padded(batch: int, keys: int) -> dict[str, Any]:
    """Left padding of two thirds and of one third."""
    ends = torch.tensor([keys * 2 // 3, keys // 3])[:batch, None, None, None]
    return {"mask": torch.arange(keys) >= ends, "causal": True}


def _documents(length: int, apart: int) -> dict[str, Any]:
    """Documents of 150 tokens; of queries that no key answers, the first `apart`."""
    keys = (torch.arange(length) // 150)[None]
    queries = torch.where(torch.arange(length) < apart, -1, keys)
    return {"query_segment_ids": queries, "key_segment_ids": keys, "causal": True}


# what should be chosen, (B, T, S, H, K, D), dtype, features, whether a gradient is asked for
CHOSEN: dict[str, tuple[str, tuple[int, ...], torch.dtype, Any, bool]] = {
    "left padding, bfloat16": (
        "flash:aten", (1, 1024, 1024, 4, 2, 32), torch.bfloat16, lambda: _padded(1, 1024), False,
    ),
    "left padding, trained": ("flash:aten", (2, 400, 400, 8, 2, 32), torch.bfloat16, lambda: _padded(2, 400), True),
    "left padding, float32": ("sdpa:aten", (2, 300, 300, 4, 2, 32), torch.float32, lambda: _padded(2, 300), True),
    "window before the padding": (
        "flash:aten", (1, 1024, 1024, 4, 2, 32), torch.bfloat16,
        lambda: {"mask": torch.arange(1024)[None, None, None] < 300, "sliding_window": 200}, False,
    ),
    "documents": ("flash:aten", (1, 1100, 1100, 4, 2, 16), torch.float32, lambda: _documents(1100, 70), True),
    "softcap and padding": (
        "flash:aten", (2, 300, 300, 8, 2, 32), torch.float32, lambda: {**_padded(2, 300), "softcap": 20.0}, False,
    ),
    "chunks and padding": (
        "blocksparse:aten", (2, 700, 700, 4, 2, 32), torch.float32, lambda: {**_padded(2, 700), "chunk_size": 130},
        True,
    ),
    "softcap and documents": (
        "blocksparse:aten", (1, 1030, 1030, 2, 1, 32), torch.float32, lambda: {**_documents(1030, 70), "softcap": 9.0},
        False,
    ),
    "softcap, few rows": (
        "vanilla:native", (2, 60, 60, 4, 2, 32), torch.float32, lambda: {**_padded(2, 60), "softcap": 9.0}, True,
    ),
    "one query": ("decode:aten", (2, 1, 300, 4, 2, 32), torch.bfloat16, lambda: {
        "mask": torch.arange(300) < torch.tensor([0, 290])[:, None, None, None]}, False),
    "one query, in C++": ("decode:cpu", (2, 1, 300, 4, 2, 32), torch.bfloat16, lambda: {
        "mask": torch.arange(300) < torch.tensor([0, 290])[:, None, None, None]}, False),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["plain", "strided"])
@pytest.mark.parametrize("name", CHOSEN)
def test_every_implementation_is_chosen_and_gives_rows_that_see_nothing_zeros(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, (b, t, s, h, k, d), dtype, features, training = CHOSEN[name]
    if expected.endswith(":cpu") and (missing := library.missing()) is not None:
        pytest.skip(f"no C++ kernels: {missing}")
    monkeypatch.setattr(processor, "AVX2", expected.endswith(":cpu"))  # whatever CPU this is
    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for tensor, shape in (("query", (b, t, h, d)), ("key", (b, s, k, d)), ("value", (b, s, k, d))):
        numbers = torch.randn(shape, generator=generator).to(dtype)
        tensors[tensor] = sweep.laid_out(numbers, layout, sweep.random.Random(SEED))
    case = sweep.Case("attention", tensors, features(), dtype, {"grad": layout}, b * h * t * s)
    attention = OperationRegistry.create("attention")
    with torch.set_grad_enabled(training):
        choice = attention.choose(*(x.detach().requires_grad_(training) for x in tensors.values()), **case.features)
    assert f"{choice.implementation}:{choice.backend}" == expected
    definition = sweep._definition(case, torch.zeros(b, t, h, d))[0]
    empty = (definition == 0).all(-1)
    assert empty.any()
    with torch.set_grad_enabled(training):
        output = attention(*(x.detach().requires_grad_(training) for x in tensors.values()), **case.features)
    assert (output.attention_outputs[empty] == 0).all()
    problems = sweep.check(case).problems
    assert not problems, "\n".join(problems)


def test_a_strided_tensor_is_copied_only_where_a_row_cannot_be_read() -> None:
    from easytorch.kernels.attention.layout import readable

    x = torch.randn(2, 5, 3, 8)
    for kept in (x, x.transpose(1, 2), x[:, 1:4], x[..., :4], x[:, :1].expand(2, 5, 3, 8)):
        assert readable(kept) is kept
    for copied in (x[..., ::2], x.mT, x.as_strided((2, 5, 3, 8), (120, 4, 40, 1)), x[..., :1].expand(2, 5, 3, 8)):
        assert readable(copied).is_contiguous()
        assert torch.equal(readable(copied), copied)


@pytest.mark.parametrize("forced", ["sdpa", "flash", "flash:aten", "vanilla"])
def test_chunks_are_refused_where_they_are_not_carried(forced: str) -> None:
    attention = OperationRegistry.create("attention", OperationMetadata(backend=forced))
    x = torch.randn(1, 4, 1, 8)
    with pytest.raises(UnsupportedOperationError, match="chunk_size is carried by blocksparse alone"):
        attention(x, x, x, chunk_size=2)
