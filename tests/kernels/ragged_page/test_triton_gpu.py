"""The Triton kernels over pages against the definition in float64, on a GPU; split among programs and not.

Under TRITON_INTERPRET=1 the same cases run on the CPU; test_triton.py does that in a process of its own.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.ragged_page import native
from easytorch.kernels.ragged_page.contract import resolve
from easytorch.kernels.ragged_page.triton_op import over_pages, ragged_page_attention
from easytorch.kernels.ragged_page.write import write_pages

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.usefixtures("poisoned_empty"),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def batch(
    lengths: list[int], contexts: list[int], *, heads: int = 6, kv_heads: int = 2, dim: int = 60,
    value_dim: int | None = None, page_size: int = 7, extra: int = 0, index: torch.dtype = torch.int32,
) -> list[torch.Tensor]:  # fmt: skip
    pages = [-(-context // page_size) for context in contexts]
    order = torch.randperm(sum(pages) + 2).tolist()
    tables = torch.full((len(lengths), max(pages) + 1), -1, dtype=index)
    for row, used in enumerate(pages):
        tables[row, :used] = torch.tensor([order.pop() for _ in range(used)], dtype=index)
    pools = [torch.randn(sum(pages) + 2, page_size, kv_heads, width) for width in (dim, value_dim or dim)]
    starts = torch.tensor([0, *lengths], dtype=index).cumsum(0).to(index)
    query = torch.randn(int(starts[-1]) + extra, heads, dim)
    return [x.to(DEVICE) for x in (query, *pools, torch.tensor(contexts, dtype=index), tables, starts)]


def check(tensors: list[torch.Tensor], dtype: torch.dtype, splits: int | None = None, **features: Any) -> None:
    given = [x.to(dtype) if x.is_floating_point() else x for x in tensors]
    wide = [x.double() if x.is_floating_point() else x for x in given]
    exact = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in features.items()}
    want = native.ragged_page_attention(*wide, **exact)
    if splits is None:
        got = ragged_page_attention(*given, **features)
    else:
        query, keys, values, *tables = given
        num_seqs = features.pop("num_seqs", None)
        call = resolve(query, keys, values, *tables, num_seqs, **features)
        got = over_pages(query, None, keys, None, values, (*tables, num_seqs), call, splits)
    assert got.dtype == dtype and got.isfinite().all()
    error = (got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error <= TOLERANCE[dtype], f"relative RMS error {error:.2e}"


MIXED = ([1, 11, 0, 1], [40, 11, 5, 3])


@pytest.mark.parametrize("splits", [None, 4])
@pytest.mark.parametrize("features", [{}, {"sliding_window": 9, "softcap": 2.0}], ids=["plain", "window_softcap"])
def test_mixed(features: dict[str, Any], splits: int | None) -> None:
    check(batch(*MIXED, extra=2), torch.float32, splits, **features)


@pytest.mark.parametrize("splits", [None, 2])
def test_everything(splits: int | None) -> None:
    features = {
        "sinks": torch.randn(6, device=DEVICE),
        "sliding_window": (30, 2),
        "causal": False,
        "softmax_scale": 0.3,
    }
    count = torch.tensor([3], device=DEVICE)
    tensors = batch(*MIXED, kv_heads=3, dim=32, value_dim=20, page_size=16, index=torch.int64)
    check(tensors, torch.float32, splits, **features, num_seqs=count)


def test_float16() -> None:
    check(batch([1, 1, 1], [70, 3, 33]), torch.float16)


def test_more_heads_than_a_tile_has_rows() -> None:
    check(batch([1, 2], [20, 9], heads=40, kv_heads=1, dim=16), torch.float32)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter truncates float32 to bfloat16 where a device rounds")
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_model_shapes(dtype: torch.dtype, dim: int) -> None:
    for lengths, contexts in (([1] * 5, [4000, 17, 900, 1, 2048]), ([1, 700, 128, 1], [3000, 700, 1000, 64])):
        for page_size in (16, 128):
            tensors = batch(lengths, contexts, heads=32, kv_heads=8, dim=dim, page_size=page_size)
            check(tensors, dtype)
            check(tensors, dtype, 8, sliding_window=500)


def test_opcheck_and_one_graph() -> None:
    query, keys, values, *tables = batch([1, 2], [9, 5], dim=16)
    arguments = (query, None, keys, None, values, *tables, None, *AttentionCall(scale=0.25, right=0), None)
    torch.library.opcheck(torch.ops.easytorch.triton_ragged_page.default, arguments)
    compiled = torch.compile(ragged_page_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(query, keys, values, *tables), ragged_page_attention(query, keys, values, *tables)
    )


@pytest.mark.parametrize("splits", [1, 4])
def test_numbers_out_of_range_read_nothing_outside(splits: int) -> None:
    """A device cannot raise: a context too long, pages that do not exist, a count past the batch."""
    query, keys, values, contexts, tables, starts = batch([1, 3, 2], [9, 5, 30], dim=16)
    contexts.copy_(torch.tensor([2**31 - 1, -5, 500]))
    tables.copy_(torch.tensor([-7, 10**6, 2**31 - 1, 0, -(2**31), 3])[torch.arange(tables.numel()) % 6].view_as(tables))
    count = torch.tensor([99], dtype=torch.int32, device=DEVICE)
    call = AttentionCall(scale=0.25, right=0)
    operator = torch.ops.easytorch.triton_ragged_page.default
    output = operator(query, None, keys, None, values, contexts, tables, starts, count, *call, splits)
    assert output.isfinite().all() and (output[1:4] == 0).all()
    starts.copy_(torch.tensor([-40, 3, 10**6, 2]))
    operator(query, None, keys, None, values, contexts, tables, starts, count, *call, splits)


@pytest.mark.skipif(not INTERPRETED, reason="a device cannot raise")
def test_numbers_out_of_range_on_the_cpu() -> None:
    query, keys, values, *tables = batch([1, 3], [9, 5], dim=16)
    for place, name in enumerate(("context_lens", "block_tables", "query_start_loc")):
        wrong = [x.clone() for x in tables]
        wrong[place].fill_(1000)
        with pytest.raises(ValueError, match=name):
            ragged_page_attention(query, keys, values, *wrong)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_write_pages(index: torch.dtype) -> None:
    pools = [torch.zeros(5, 4, 2, width, device=DEVICE) for width in (8, 6)]
    rows = [torch.randn(4, 2, width, device=DEVICE) for width in (8, 6)]
    write_pages(*pools, *rows, torch.tensor([17, -1, 0, 7], dtype=index, device=DEVICE))
    for pool, row in zip(pools, rows, strict=True):
        expected = torch.zeros_like(pool)
        expected[4, 1], expected[0, 0], expected[1, 3] = row[0], row[2], row[3]
        assert torch.equal(pool, expected)
