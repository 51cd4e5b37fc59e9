"""The Triton kernels against the definition in float64: outputs and every gradient, on a GPU.

Under TRITON_INTERPRET=1 the same cases run on the CPU; test_triton.py does that in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.blocksparse import native
from easytorch.kernels.blocksparse.triton_op import blocksparse_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.usefixtures("poisoned_empty"),
]


def heads(
    b: int = 1, t: int = 63, s: int = 63, h: int = 2, k: int = 1, d: int = 60, dv: int | None = None
) -> dict[str, torch.Tensor]:
    torch.manual_seed(t + s)
    shapes = {"query": (b, t, h, d), "key": (b, s, k, d), "value": (b, s, k, dv or d)}
    return {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}


def documents(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.stack([torch.arange(length) // (17 + 9 * b) for b in range(batch)]).to(DEVICE)
    return {"query_segment_ids": ids, "key_segment_ids": ids}


def pieces(length: int) -> torch.Tensor:
    return (torch.arange(length, device=DEVICE) // 20 % 2)[None]


def blocks(rows: int, columns: int) -> torch.Tensor:
    """A mask of whole blocks, some partly: (rows, columns)."""
    row, column = torch.arange(rows, device=DEVICE)[:, None], torch.arange(columns, device=DEVICE)
    return ((row // 32 + column // 16) % 3 != 0) & ((column // 16 != 1) | (row % 2 == 0))


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: heads(h=6, k=2),
    "causal": lambda: {**heads(b=2), "causal": True},
    "one query": lambda: {**heads(t=1, h=4), "causal": True, "chunk_size": 20},
    "rows before the first key": lambda: {**heads(s=24), "causal": True, "prefix_length": 5},
    "window": lambda: {**heads(t=40), "sliding_window": (20, 5)},
    "chunks": lambda: {**heads(b=2, t=40), "chunk_size": 24, "causal": True},
    "prefix of each batch": lambda: {
        **heads(b=2), "causal": True, "prefix_length": torch.tensor([0, 40]), "sliding_window": (50, 20),
    },
    "documents": lambda: {**heads(b=2, t=90, s=90), **documents(2, 90), "causal": True},
    "segments in pieces": lambda: {**heads(t=40), "query_segment_ids": pieces(40), "key_segment_ids": pieces(63)},
    "mask": lambda: {**heads(t=90, s=90), "mask": blocks(90, 90), "bias": torch.randn(1, 90, 90, device=DEVICE)},
    "mask of the keys": lambda: {
        **heads(), "mask": torch.arange(63, device=DEVICE) // 16 != 1, "sinks": torch.randn(2, device=DEVICE),
    },
    "strides of sinks": lambda: {**heads(t=20, h=2), "sinks": torch.randn(2, 3, device=DEVICE)[:, 1]},
    "everything": lambda: {
        **heads(t=70, h=4, k=2, dv=33), "mask": blocks(70, 63)[None, None],
        "bias": torch.randn(1, 1, 70, 63, device=DEVICE), "causal": True, "sliding_window": (50, 50),
        "query_segment_ids": pieces(70), "key_segment_ids": pieces(63),
        "softcap": 4.0, "sinks": torch.randn(4, device=DEVICE), "softmax_scale": 0.4, "dropout_prob": 0.2,
        "seed": torch.tensor(5), "chunk_size": 45, "prefix_length": 10,
    },
}  # fmt: skip


def definition(**given: Any) -> torch.Tensor:
    return native.attention(**given)[0]


@pytest.mark.parametrize("name", CASES)
def test_float32(name: str, assert_matches: Callable[..., None]) -> None:
    assert_matches(blocksparse_attention, definition, CASES[name](), torch.float32)


@pytest.mark.parametrize("level", [torch.finfo(torch.float32).min, 1e30])
def test_a_bias_as_large_throughout_a_row(level: float, assert_matches: Callable[..., None]) -> None:
    bias = torch.where(
        torch.arange(20, device=DEVICE)[:, None] % 3 == 0, level, torch.randn(1, 1, 20, 40, device=DEVICE)
    )
    given = {**heads(t=20, s=40), "bias": bias}
    if level == 1e30:
        given["sinks"] = torch.tensor([0.5, level], device=DEVICE)
    assert_matches(blocksparse_attention, definition, given, torch.float32)


# the interpreter takes seconds a case
@pytest.mark.parametrize("name", ["documents"] if INTERPRETED else CASES)
def test_float16(name: str, assert_matches: Callable[..., None]) -> None:
    assert_matches(blocksparse_attention, definition, CASES[name](), torch.float16)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter truncates float32 to bfloat16 where a device rounds")
@pytest.mark.parametrize("name", CASES)
def test_bfloat16(name: str, assert_matches: Callable[..., None]) -> None:
    assert_matches(blocksparse_attention, definition, CASES[name](), torch.bfloat16)


@pytest.mark.parametrize("shape", [{"s": 0}, {"t": 0}, {"b": 0}], ids=str)
def test_empty(shape: dict[str, int], assert_matches: Callable[..., None]) -> None:
    given = {**heads(**{"t": 3, "s": 3, **shape}), "causal": True}
    assert_matches(blocksparse_attention, definition, given, torch.float32)


def test_blocks_that_nothing_sees_are_never_read() -> None:
    """NaN in keys and values of blocks that no block of queries sees: it would spread."""
    given = heads(t=64, s=256)
    features = {"mask": torch.arange(256, device=DEVICE) // 64 != 1, "causal": True, "sliding_window": 224}
    poison = torch.zeros(256, dtype=torch.bool, device=DEVICE)
    poison[64:128] = True
    leaves = {
        n: (x if n == "query" else x.masked_fill(poison[:, None, None], torch.nan)).requires_grad_()
        for n, x in given.items()
    }
    clean = {n: x.detach().double().nan_to_num().requires_grad_() for n, x in leaves.items()}
    got, expected = blocksparse_attention(**leaves, **features), definition(**clean, **features)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    for name, x in leaves.items():
        grad, want = (
            torch.autograd.grad(y.sum(), z, retain_graph=True)[0] for y, z in ((got, x), (expected, clean[name]))
        )
        torch.testing.assert_close(grad.double(), want, rtol=1e-4, atol=1e-5)


def test_compiles_to_one_graph() -> None:
    given = {**heads(t=9, s=9), "chunk_size": 4, "dropout_prob": 0.3, "seed": 3}
    compiled = torch.compile(blocksparse_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given), blocksparse_attention(**given))


def test_opcheck() -> None:
    tensors = [x.requires_grad_() for x in heads(t=5, s=6, d=8).values()]
    begin, end = (torch.full((1, 5), at, dtype=torch.int32, device=DEVICE) for at in (0, 5))
    forward = torch.ops.easytorch.triton_blocksparse_forward.default
    torch.library.opcheck(forward, (*tensors, begin, end, *AttentionCall(scale=0.3)))
    bias, sinks = (torch.randn(x, device=DEVICE, requires_grad=True) for x in ((1, 2, 1, 6), (2,)))
    mask, seed = torch.rand(1, 1, 5, 6, device=DEVICE) > 0.2, torch.tensor(3, device=DEVICE)
    torch.library.opcheck(
        forward, (*tensors, begin, end, mask, bias, pieces(5), pieces(6), sinks, seed, 0.3, 3, None, 2.0, 0.2)
    )
