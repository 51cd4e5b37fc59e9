"""`attention_step_pages` in C++: every instruction set this CPU has, rows at different positions, bad tables."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import library
from easytorch.kernels.decoder_step import cpu, native
from easytorch.kernels.decoder_step.native import AttentionWeights, PageSlots
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.decoder_step.test_cpu import DTYPES, Case, inputs, mapped, of_codes
from tests.kernels.linear.guard import guarded

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")


class Pages(NamedTuple):
    """Of each sequence: how many of the rows are its, and its keys, those of the rows included."""

    rows: list[int]
    keys: list[int]
    size: int
    window: int | None = None
    kept: bool = True  # all rows but the last are written otherwise


class Inputs(NamedTuple):
    x: Tensor
    attention: AttentionWeights
    angles: tuple[Tensor, Tensor] | None
    pages: PageSlots
    call: AttentionCall


CASES = (
    (Case(1, 64, 4, 2, 16, 8, 1, 0, 0, 1), Pages([1], [1], 4)),
    (Case(4, 128, 4, 1, 32, 8, 1, 0, 0, 1, bias=True, head_norms=True, turned=32), Pages([1] * 4, [3, 700, 1, 17], 16)),
    (Case(5, 96, 6, 6, 24, 8, 1, 0, 0, 1, turned=10, softcap=5.0), Pages([3, 1, 0, 1], [40, 9, 5, 300], 5, window=8)),
    (Case(3, 128, 4, 1, 33, 8, 1, 0, 0, 1, head_norms=True, sinks=True), Pages([1, 2], [530, 2], 64, kept=False)),
    (Case(16, 70, 8, 2, 16, 8, 1, 0, 0, 1, bias=True, turned=16), Pages([16], [600], 16, window=100)),
)


def over_pages(case: Case, pages: Pages, seed: int, drawn: Any = None) -> Inputs:
    """Every sequence has pages of its own, in any order; those of nobody hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    given = inputs(case, seed) if drawn is None else drawn
    columns = [-(-keys // pages.size) for keys in pages.keys]
    order = torch.randperm(sum(columns) + 2, generator=generator).tolist()
    tables = torch.zeros(len(pages.keys), max(columns), dtype=torch.int32)
    shape = (len(order), pages.size, case.kv_heads, case.head_dim)
    pools = [torch.full(shape, float("nan")) for _ in "kv"]
    slots: list[int] = []
    for sequence, (rows, keys, count) in enumerate(zip(pages.rows, pages.keys, columns, strict=True)):
        own = [order.pop() for _ in range(count)]
        tables[sequence, :count] = torch.tensor(own)
        places = [own[place // pages.size] * pages.size + place % pages.size for place in range(keys)]
        slots += places[keys - rows :]
        for pool in pools:
            pool.view(-1, *shape[2:])[places] = torch.randn(keys, *shape[2:], generator=generator)
    if not pages.kept:
        slots[-1] = -1
    starts = torch.tensor([0, *pages.rows], dtype=torch.int64).cumsum(0)
    lens = torch.tensor(pages.keys, dtype=torch.int32)
    call = given.call._replace(left=None if pages.window is None else pages.window - 1, right=0, mask=None)
    made = PageSlots(*pools, torch.tensor(slots), lens, tables, starts)
    return Inputs(given.x, given.attention, given.angles, made, call)


def run(kernel: Any, given: Inputs, **more: Any) -> Tensor:
    attended: Tensor = kernel.attention_step_pages(*given, **more)
    return attended


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_steps_over_pages_are_the_definitions(number: int, level: int, dtype: torch.dtype) -> None:
    given = mapped(over_pages(*CASES[number], seed=level), lambda tensor: guarded(tensor.to(dtype)))
    exact = mapped(given, lambda tensor: tensor.double())
    before = [pool.clone() for pool in given.pages[:2]]
    got, expected = run(cpu, given, level=level), run(native, exact)
    assert got.dtype == dtype and got.shape == expected.shape
    assert relative_rms_error(got, expected) <= TOLERANCE[dtype]
    slots = given.pages.slots[given.pages.slots >= 0]
    for pool, theirs, old in zip(given.pages[:2], exact.pages[:2], before, strict=True):
        flat, places = pool.flatten(0, 1), slots
        assert relative_rms_error(flat[places], theirs.flatten(0, 1)[places]) <= TOLERANCE[dtype]
        flat[places] = old.flatten(0, 1)[places]
        assert torch.equal(pool.nan_to_num(7.0), old.nan_to_num(7.0)), "another token's key was written to"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_projections_over_pages(dtype: torch.dtype) -> None:
    drawn = of_codes(3, 1, dtype)
    case = Case(3, 256, 4, 2, 64, 256, 30, 0, 20, 21, bias=True, turned=64)
    given = over_pages(case, Pages([1, 2], [20, 300], 16), 0, drawn)
    pools = [pool.to(dtype) for pool in given.pages[:2]]
    given = given._replace(pages=PageSlots(*pools, *given.pages[2:]))
    exact = mapped(given, lambda tensor: tensor.double())
    assert relative_rms_error(run(cpu, given), run(native, exact)) <= TOLERANCE[dtype]


def test_rows_that_share_pages_see_what_another_row_has_just_written() -> None:
    """As a prompt's tokens do whose first pages another request fills in the same step."""
    case = Case(4, 64, 4, 2, 16, 8, 1, 0, 0, 1)
    given = over_pages(case, Pages([4], [4], 4), seed=3)
    pages = given.pages
    apart = pages._replace(
        context_lens=torch.tensor([1, 2, 3, 4]),
        block_tables=pages.block_tables.expand(4, -1).contiguous(),
        query_start_loc=torch.arange(5),
    )
    together = run(cpu, given)
    for pool in pages[:2]:
        pool.fill_(float("nan"))
    torch.testing.assert_close(run(cpu, given._replace(pages=apart)), together, rtol=1e-5, atol=1e-5)


def test_the_number_of_threads_changes_no_bit_over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2, 4):
        results = []
        for threads in (1, 2, 7):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            given = over_pages(*CASES[number], seed=5)
            results.append((run(cpu, given), *(pool.nan_to_num(7.0) for pool in given.pages[:2])))
        for result in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_tables_that_do_not_fit_are_refused() -> None:
    """By the operator itself: nothing outside the pages is read or written, whatever its caller checked."""
    good = over_pages(*CASES[1], seed=7)
    pages = good.pages
    count = len(pages.key_pages)
    changed = functools.partial(pages._replace)
    bad: dict[str, PageSlots] = {
        "a slot behind the pages": changed(slots=torch.tensor([0, 1, 2, count * 16])),
        "a slot before them": changed(slots=torch.tensor([0, 1, 2, -2])),
        "too few slots": changed(slots=pages.slots[:3].clone()),
        "slots of another dtype": changed(slots=pages.slots.float()),
        "a page behind the pool": changed(block_tables=pages.block_tables.where(pages.block_tables > 0, count)),
        "more keys than pages": changed(context_lens=torch.tensor([3, 10**6, 1, 17])),
        "no keys": changed(context_lens=torch.tensor([0, 700, 1, 17])),
        "a row of no sequence": changed(query_start_loc=torch.tensor([0, 1, 2, 3, 3])),
        "rows behind the tokens": changed(query_start_loc=torch.tensor([0, 1, 2, 3, 5])),
        "another number of sequences": changed(context_lens=pages.context_lens[:3].clone()),
        "another dtype": changed(key_pages=pages.key_pages.double()),
        "other values": changed(value_pages=pages.value_pages[:-1].clone()),
        "heads": changed(key_pages=pages.key_pages[:, :, :0], value_pages=pages.value_pages[:, :, :0]),
    }
    before = [pool.clone() for pool in pages[:2]]
    for what, given in bad.items():
        with pytest.raises(RuntimeError, match="easytorch"):
            run(cpu, good._replace(pages=given))
            pytest.fail(f"{what} was taken")
    with pytest.raises(RuntimeError, match="easytorch"):
        run(cpu, good._replace(call=good.call._replace(mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))))
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(pages[:2], before, strict=True))
