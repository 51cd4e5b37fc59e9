"""ragged_page_attention in C++: every instruction set this CPU has, against each query row in float64.

What of the pages is not in use holds NaN, and nothing is read past a tensor.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import library
from easytorch.kernels.ragged_page import contract, cpu, grouped
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded
from tests.operations.test_ragged_page import CASES, MIXED, Batch, dense, make

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
LEVELS = pytest.mark.parametrize("level", library.levels_of("decode"))
# rows and keys of sequences, and what else `make` takes: more keys than a block and a task have, rows than a block has
SIZES: tuple[tuple[tuple[list[int], list[int]], dict[str, Any]], ...] = (
    (([1], [1]), {"heads": 1, "kv_heads": 1, "dim": 1, "value_dim": 1, "page_size": 1}),
    (([1, 1, 1], [300, 64, 129]), {"heads": 4, "kv_heads": 1, "dim": 33, "value_dim": 100, "page_size": 16}),
    (([2, 1, 0, 3], [70, 400, 9, 3]), {"heads": 22, "kv_heads": 2, "dim": 16, "value_dim": 20, "page_size": 64}),
    (([140, 1], [150, 700]), {"heads": 3, "kv_heads": 3, "dim": 8, "value_dim": 36, "page_size": 5, "extra": 3}),
)


def features(heads: int) -> list[dict[str, Any]]:
    return [
        {"softcap": 1.5, "softmax_scale": -0.7},
        {"sinks": torch.linspace(-1, 2, heads), "sliding_window": 9, "softcap": 30.0},
        {"sliding_window": (70, 2), "causal": False},
    ]


def run(batch: Batch, level: int, num_seqs: int | None = None, **given: Any) -> torch.Tensor:
    call = contract.resolve(*batch, num_seqs, **given)
    return cpu.over_pages(*batch, num_seqs, call, most_rows=10**6, level=level)


def check(batch: Batch, level: int, given: dict[str, Any], share: float = 0.5) -> None:
    expected, got = dense(batch, **given), run(batch, level, **given)
    assert got.dtype == batch.query.dtype
    assert got.is_contiguous()
    error = relative_rms_error(got, expected)
    assert error <= TOLERANCE[got.dtype] * share, f"{tuple(batch.query.shape)} {list(given)}: {error}"
    assert (got[int(batch.query_start_loc[-1]) :] == 0).all()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@needs_library
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@LEVELS
def test_every_feature(level: int, dtype: torch.dtype) -> None:
    for build, given in CASES.values():
        batch = build()
        check(Batch(*(x.to(dtype) for x in batch[:3]), *batch[3:]), level, given)


@needs_library
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
def test_odd_sizes(dtype: torch.dtype) -> None:
    for number, (lengths, sizes) in enumerate(SIZES):
        given = features(sizes["heads"])
        for level in range(len(library.LEVELS)):
            check(make(*lengths, **sizes, dtype=dtype), level, given[(number + level) % len(given)])


@needs_library
def test_every_layout() -> None:
    for dtype in cpu.DTYPES:
        batch = make(*MIXED, dtype=dtype, value_dim=36)
        turned = [x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in batch[:1]]
        turned += [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in batch[1:3]]
        heads_first = [batch.query, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in batch[1:3])]
        apart = [torch.stack([x, torch.full_like(x, 9)], -1)[..., 0] for x in batch]
        for laid in (turned, heads_first, apart[:3]):
            check(Batch(*laid, *batch[3:]), library.BEST, {"sliding_window": 20}, share=1.0)
        check(Batch(*batch[:3], *apart[3:]), library.BEST, {})


@needs_library
def test_longer_sequences_are_those_of_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    most = cpu.MOST_ROWS
    batch = make([1, most, most + 1, 0, 2, 40], [20, most, 31, 5, 9, 43], extra=2)
    for given in ({"sliding_window": 12}, {"softcap": 2.0}):
        taken: list[int] = []
        prefill = grouped.prefill

        def counted(*arguments: Any, prefill: Any = prefill, taken: list[int] = taken) -> torch.Tensor:
            taken.append(arguments[4].last - arguments[4].first)
            return prefill(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(grouped, "prefill", counted)
            got = cpu.ragged_page_attention(*batch, **given)
        assert taken == [most + 1, 40]
        assert relative_rms_error(got, dense(batch, **given)) <= TOLERANCE[torch.float32]


@needs_library
def test_sizes_of_zero() -> None:
    batch = make([1, 2], [9, 4])
    empty = [
        batch._replace(query=batch.query[:0], query_start_loc=torch.zeros(3, dtype=torch.int32)),
        batch._replace(value_pages=batch.value_pages[..., :0]),
        Batch(*batch[:3], *(x[:0] for x in batch[3:5]), batch.query_start_loc[:1]),
        make([0, 0], [0, 5])._replace(query=batch.query),
        Batch(batch.query, *(x[:0] for x in batch[1:5]), batch.query_start_loc[:1]),
    ]
    for given in empty:
        got = run(given, library.BEST)
        assert got.shape == (*given.query.shape[:2], given.value_pages.shape[3])
        assert (got == 0).all()


@needs_library
def test_rows_that_see_nothing() -> None:
    batch = make([3, 1], [5, 9])
    for given in ({"sliding_window": (0, 0)}, {"sliding_window": (2**62, 2**62), "causal": False}):
        check(batch, library.BEST, given)
    batch.key_pages[:] = float("-inf")
    batch.query[:] = 1.0
    assert (run(batch, library.BEST) == 0).all()


@needs_library
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    batch, threads = make([1, 40, 1], [900, 70, 3], dtype=torch.bfloat16), torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(run(batch, library.BEST))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_library
def test_what_it_refuses() -> None:
    batch = make(*MIXED)
    for wrong, reason in ((batch.query.double(), "float64"), (batch.query.clone().requires_grad_(), "no gradient")):
        pages = [x.to(wrong.dtype) for x in batch[1:3]]
        with pytest.raises(NotImplementedError, match=reason):
            cpu.ragged_page_attention(wrong, *pages, *batch[3:])
        with torch.no_grad():
            assert (cpu.supports(wrong.dtype, wrong, *pages) is None) == (reason == "no gradient")


@needs_library
def test_the_operator_refuses_what_does_not_fit() -> None:
    """By itself, too: no number in a table makes it read outside of the pools."""
    batch = make([1, 3], [9, 20], heads=4, dim=8, value_dim=6, page_size=4)
    query, keys, values, lens, tables, starts = batch
    good = [*batch, None, None, 1, *AttentionCall(left=5, right=0), 9, library.BEST]
    mask, bias, sinks, left, right = (
        9 + AttentionCall._fields.index(name) for name in ("mask", "bias", "sinks", "left", "right")
    )
    assert torch.ops.easytorch_cpu.ragged_page.default(*good).shape == (4, 4, 6)

    def put(tensor: torch.Tensor, place: Any, number: int) -> torch.Tensor:
        tensor = tensor.long().clone()
        tensor[place] = number
        return tensor

    for index, wrong in (
        (0, query[0]), (0, query[..., :7]), (0, query[:, :3]), (0, query[:3]), (0, query.double()), (0, query[:, :0]),
        (1, keys[:-1]), (1, keys[:, :3]), (1, keys.bfloat16()), (1, keys[..., :0]), (1, keys[:, :0]), (1, keys[0]),
        (1, torch.zeros(*keys.shape[:3], 16)[..., ::2]), (2, values[:, :, :1]), (2, values.half()),
        (3, lens[:1]), (3, lens.float()), (3, lens[None]), (3, put(lens, 1, 2)), (3, put(lens, 0, -1)),
        (3, put(lens, 1, 24 + 4 + 1)), (3, put(lens, 1, 2**63 - 1)), (4, tables[:1]), (4, tables[0]),
        (4, tables.double()),
        (4, put(tables, (1, 4), len(keys))), (4, put(tables, (1, 4), -1)), (4, put(tables, (0, 1), 2**62)),
        (4, put(tables, (1, 3), -(2**63))), (5, starts[:2]), (5, put(starts, 0, 1)), (5, put(starts, 1, 5)),
        (5, put(starts, 2, 5)), (5, put(starts, 1, -1)), (5, put(starts, 2, 2**63 - 1)), (5, starts.bool()),
        (sinks, torch.zeros(3)), (sinks, torch.zeros(8)[::2]), (mask, torch.ones(1, dtype=torch.bool)),
        (6, torch.ones(9, 4, 2, 1)), (7, torch.ones(9, 4, 2, 1)),
        (bias, torch.zeros(1)), (left, 2**62), (left, -(2**62)), (right, 2**62), (right, -(2**62)),
    ):  # fmt: skip
        given = list(good)
        given[index] = wrong
        with pytest.raises(RuntimeError, match=r"easytorch: (ragged_page|attention)"):
            torch.ops.easytorch_cpu.ragged_page.default(*given)
    # entries that are not in use may be anything
    torch.ops.easytorch_cpu.ragged_page.default(*good[:4], put(tables, (1, -1), 2**62), *good[5:])
    torch.ops.easytorch_cpu.ragged_page.default(*good[:4], put(tables, (1, 0), -9), *good[5:])


@needs_library
def test_it_is_chosen_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from easytorch.kernels.cpu import processor

    operation, batch = OperationRegistry.create("ragged_page_attention"), make(*MIXED)
    monkeypatch.setattr(processor, "AVX2", True)
    assert operation.choose(*batch).backend == "cpu"
    asked = batch._replace(query=batch.query.clone().requires_grad_())
    assert operation.choose(*asked).backend == "aten"
    with torch.no_grad():
        assert operation.choose(*asked).backend == "cpu"
    with torch.inference_mode():
        output = operation(*batch, softcap=2.0).attention_outputs
    assert relative_rms_error(output, dense(batch, softcap=2.0)) <= TOLERANCE[torch.float32]
    assert operation.choose(*(x.double() if x.is_floating_point() else x for x in batch)).backend == "aten"
    with torch.autocast("cpu", torch.bfloat16):
        assert operation.choose(*batch).backend == "aten"
    monkeypatch.setattr(processor, "AVX2", False)
    assert operation.choose(*batch).backend == "aten"


def read_up_to_guard_pages() -> None:
    torch.manual_seed(0)
    for level in range(len(library.LEVELS)):
        for dtype in cpu.DTYPES:
            for dim, value_dim in ((1, 1), (33, 31), (63, 65), (20, 96)):
                # the last page is the last of a sequence, and full
                batch = make([1, 3], [6, 12], dim=dim, value_dim=value_dim, page_size=3, dtype=dtype)
                used = sorted({int(x) for x in batch.block_tables.flatten() if x >= 0})
                tables = torch.tensor(
                    [[used.index(int(x)) if x >= 0 else -1 for x in row] for row in batch.block_tables]
                )
                pools = [x[used] for x in batch[1:3]]
                moved = Batch(batch.query, *pools, batch.context_lens, tables[:, :-1], batch.query_start_loc)
                sinks = torch.linspace(-1, 1, 6).to(dtype)
                check(Batch(*map(guarded, moved)), level, {"sinks": guarded(sinks)})


@needs_library
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages by mprotect")
def test_nothing_is_read_past_the_end() -> None:
    """In a process of its own, which a fault would end."""
    program = "from tests.kernels.ragged_page.test_cpu import read_up_to_guard_pages as run; run()"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
