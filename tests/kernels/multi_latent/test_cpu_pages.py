"""Latent attention over pages in C++: every instruction set this CPU has, against each sequence in float64.

What of the pages is not in use holds NaN, and nothing is read past a tensor.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import library, processor
from easytorch.kernels.multi_latent import cpu_pages, paged
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
every_level = pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
LATENT, ROPE, NOPE, VALUE = 36, 10, 30, 20
# query rows and keys of each sequence, heads, page size: several blocks of rows and tasks of keys, no rows at all
SIZES = (
    ([1], [1], 1, 1), ([1, 1, 1], [300, 64, 129], 5, 16), ([2, 1, 0, 3], [70, 400, 9, 3], 20, 64),
    ([33, 1, 4], [50, 700, 4], 7, 5), ([3, 2], [9, 300], 130, 7),
)  # fmt: skip


class Batch(NamedTuple):
    """The arguments of the operation, in order."""

    query: torch.Tensor
    query_rope: torch.Tensor
    latent_pages: paged.Pages
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    num_seqs: int | None
    up_key: torch.Tensor | None
    up_value: torch.Tensor | None


def make(
    lengths: list[int], contexts: list[int], heads: int, page_size: int, dtype: torch.dtype = torch.float32,
    extra: int = 0, widths: tuple[int, int, int, int] = (LATENT, ROPE, NOPE, VALUE),
) -> Batch:  # fmt: skip
    """A batch whose pages lie in any order, NaN in all that no key is in; `extra` rows belong to no sequence."""
    width, rope, dim, value_dim = widths
    counts = [-(-context // page_size) for context in contexts]
    order = torch.randperm(sum(counts) + 3).tolist()
    pages = torch.full((len(order), page_size, width + rope), float("nan"))
    tables = torch.zeros(len(contexts), max(counts) + 1, dtype=torch.int32)
    for b, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        own = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
        tables[b, :count] = own
        rows = pages[own].flatten(0, 1)
        rows[:context] = torch.randn(context, width + rope)
        pages[own] = rows.unflatten(0, (count, page_size))
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    tokens = sum(lengths) + extra
    up_key = torch.randn(heads, dim, width) / max(dim, 1) ** 0.5
    up_value = torch.randn(heads, value_dim, width) / width**0.5
    query, query_rope = torch.randn(tokens, heads, dim), torch.randn(tokens, heads, rope)
    floats = [x.to(dtype) for x in (query, query_rope, pages, up_key, up_value)]
    lens = torch.tensor(contexts, dtype=torch.int32)
    return Batch(*floats[:3], lens, tables, starts, None, *floats[3:])  # type: ignore[arg-type]


def features(heads: int) -> list[dict[str, Any]]:
    return [
        {}, {"softcap": 1.5, "softmax_scale": -0.7}, {"sliding_window": (70, 2), "causal": False},
        {"sinks": torch.linspace(-1, 2, heads), "sliding_window": 9, "softcap": 30.0},
    ]  # fmt: skip


def dense(batch: Batch, **given: Any) -> torch.Tensor:
    """Each sequence in float64."""
    exact = [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point()
        else tuple(one.double() for one in x) if isinstance(x, tuple) else x
        for x in batch
    ]  # fmt: skip
    wide = {name: x.double() if name == "sinks" else x for name, x in given.items()}
    return paged.definition(*exact, **wide)  # type: ignore[arg-type]


def run(batch: Batch, level: int = library.BEST, **given: Any) -> torch.Tensor:
    call = paged.resolve(*batch, features=given)
    return cpu_pages.over_pages(
        batch.query, batch.query_rope, call, batch.up_key, batch.up_value, most_rows=10**6, level=level
    )


def check(batch: Batch, level: int, given: dict[str, Any], share: float = 0.5) -> None:
    given = {"softmax_scale": 0.1, **given}
    expected, got = dense(batch, **given), run(batch, level, **given)
    assert got.dtype == batch.query.dtype
    assert got.shape == expected.shape
    assert got.is_contiguous()
    error = relative_rms_error(got, expected)
    assert error <= TOLERANCE[got.dtype] * share, f"{tuple(batch.query.shape)} {list(given)}: {error}"
    assert (got[int(batch.query_start_loc[-1]) :] == 0).all()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@needs_library
@pytest.mark.parametrize("dtype", cpu_pages.DTYPES, ids=str)
@every_level
def test_every_feature_at_odd_sizes(level: int, dtype: torch.dtype) -> None:
    for size in SIZES:
        for given in features(size[2]):
            check(make(*size, dtype=dtype, extra=2), level, given)


@needs_library
def test_other_widths_and_absent_projections() -> None:
    for dtype in cpu_pages.DTYPES:
        for widths in ((1, 1, 1, 2), (48, 0, 7, 31), (16, 16, 0, 3), (512, 64, 128, 128)):
            check(make([1, 3], [90, 20], 3, 16, dtype, widths=widths), library.BEST, {})
        batch = make([1, 3], [90, 20], 3, 16, dtype, widths=(34, 6, 34, 20))
        batch = batch._replace(query=batch.query / 34**0.5)
        for absent in ({"up_key": None}, {"up_value": None, "up_key": None}):
            check(batch._replace(**absent), library.BEST, {})
        check(make([1, 3], [90, 20], 3, 16, dtype)._replace(up_value=None), library.BEST, {})


@needs_library
def test_every_layout() -> None:
    for dtype in cpu_pages.DTYPES:
        batch = make([2, 1, 5], [70, 300, 9], 6, 16, dtype)
        assert isinstance(batch.latent_pages, torch.Tensor) and batch.up_key is not None
        pools = batch.latent_pages.split([LATENT, ROPE], -1)
        apart = torch.stack([batch.latent_pages, torch.full_like(batch.latent_pages, 9)], -1)[..., 0]
        check(batch._replace(latent_pages=(pools[0].contiguous(), pools[1].contiguous())), library.BEST, {}, 1.0)
        check(batch._replace(latent_pages=apart), library.BEST, {"sliding_window": 20}, 1.0)
        turned = [x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in (batch.query, batch.query_rope)]
        check(batch._replace(query=turned[0], query_rope=turned[1]), library.BEST, {}, 1.0)
        up = batch.up_key.transpose(1, 2).contiguous().transpose(1, 2)
        check(batch._replace(up_key=up, context_lens=batch.context_lens.long()), library.BEST, {}, 1.0)
        tables = [torch.stack([x, x + 9], -1)[..., 0] for x in batch[3:6]]  # type: ignore[operator]
        check(Batch(*batch[:3], *tables, *batch[6:]), library.BEST, {}, 1.0)


@needs_library
def test_longer_sequences_are_those_of_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    most, taken = cpu_pages.MOST_ROWS, []
    by_plan = paged.by_plan

    def counted(*given: Any) -> torch.Tensor:
        taken.append(len(given[0]))
        return by_plan(*given)

    monkeypatch.setattr(paged, "by_plan", counted)
    batch = make([1, most, most + 1, 0, 2, 40], [20, most, 31, 5, 9, 43], 3, 8, extra=2)
    for given in ({"sliding_window": 12}, {"softcap": 2.0}):
        got = cpu_pages.ragged_page_multi_latent_attention(*batch, **given)
        assert relative_rms_error(got, dense(batch, **given)) <= TOLERANCE[torch.float32]
    assert taken == [most + 1, 40] * 2


@needs_library
def test_fewer_sequences_than_the_tables_hold() -> None:
    batch = make([1, 2, 3], [20, 30, 40], 3, 8)
    for number in (2, torch.tensor(2), torch.tensor([2])):
        given = batch._replace(num_seqs=number)  # type: ignore[arg-type]
        got = cpu_pages.ragged_page_multi_latent_attention(*given)
        assert relative_rms_error(got, dense(given)) <= TOLERANCE[torch.float32]
        assert (got[3:] == 0).all()


@needs_library
def test_what_is_empty() -> None:
    batch = make([1, 2], [9, 4], 3, 4, extra=1)
    none = batch._replace(query_start_loc=torch.zeros(3, dtype=torch.int32))
    assert torch.equal(run(none), torch.zeros(4, 3, VALUE))
    no_rows = none._replace(query=batch.query[:0], query_rope=batch.query_rope[:0])
    assert run(no_rows).shape == (0, 3, VALUE)
    assert batch.up_value is not None
    assert run(batch._replace(up_value=batch.up_value[:, :0])).shape == (4, 3, 0)
    hidden = run(batch, sliding_window=(2**62, 2**62), causal=False)
    assert relative_rms_error(hidden, dense(batch, sliding_window=(2**62, 2**62), causal=False)) <= 1e-5


@needs_library
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    batch, threads = make([1, 16, 1], [900, 70, 3], 12, 16, torch.bfloat16), torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(run(batch))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_library
@pytest.mark.skipif(not processor.AVX512, reason="chosen where it was measured")
def test_it_is_chosen() -> None:
    operation = OperationRegistry.create("ragged_page_multi_latent_attention")
    batch = make([1, 2], [9, 4], 3, 4, torch.bfloat16)
    assert operation.choose(*batch).backend == "cpu"
    got = operation(*batch).attention_outputs
    assert torch.equal(got, cpu_pages.ragged_page_multi_latent_attention(*batch))
    trained = batch._replace(query=batch.query.clone().requires_grad_())
    assert operation.choose(*trained).backend == "aten"
    exact = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in batch]
    assert operation.choose(*exact).backend == "aten"


@needs_library
def test_the_operator_refuses_what_does_not_fit() -> None:
    query, rope = torch.zeros(3, 4, 8), torch.zeros(3, 4, 2)
    latent, keys = torch.zeros(5, 4, 6), torch.zeros(5, 4, 2)
    lens, tables, starts = torch.tensor([4, 7]), torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1, 3])
    up_key, up_value = torch.zeros(4, 8, 6), torch.zeros(4, 5, 6)
    good = [
        query, rope, latent, keys, lens, tables, starts, up_key, up_value, *AttentionCall(right=0), 9, library.BEST,
    ]  # fmt: skip
    operator = torch.ops.easytorch_cpu.multi_latent_pages.default
    assert operator(*good).shape == (3, 4, 5)
    of_call = {name: 9 + place for place, name in enumerate(AttentionCall._fields)}
    for index, wrong in (
        (0, query[:2]), (0, query[..., :7]), (0, query[0]), (0, query.double()), (0, query[:, :0]), (1, rope[:2]),
        (1, rope[:, :3]), (1, rope[..., :1]), (1, rope.bfloat16()), (2, latent[:4]), (2, latent[:, :3]),
        (2, latent[..., :5]), (2, latent[..., :0]), (2, torch.zeros(5, 6, 4).mT), (2, latent[:, :0]), (2, latent[0]),
        (3, keys[:, :3]), (3, keys[..., :1]), (3, torch.zeros(5, 4, 4)[..., ::2]), (4, lens[:1]), (4, lens.short()),
        (4, torch.tensor([0, 7])), (4, torch.tensor([4, 9])), (4, torch.tensor([4, -1])), (5, tables[0]),
        (5, tables[:, :1]), (5, tables + 2), (5, tables - 1), (5, tables.double()), (6, starts[:2]), (6, starts + 1),
        (6, torch.tensor([0, 2, 1])), (6, torch.tensor([0, 1, 4])), (7, up_key[:3]), (7, up_key[:, :7]),
        (7, torch.zeros(4, 6, 8).mT), (7, up_key.bfloat16()), (7, up_key[0]), (7, None), (8, up_value[..., :5]),
        (8, up_value[0, 0]), (8, torch.zeros(4, 6, 5).mT), (of_call["mask"], torch.ones(1, dtype=torch.bool)),
        (of_call["bias"], torch.zeros(1)), (of_call["sinks"], torch.zeros(3)), (of_call["dropout_prob"], 0.5),
    ):  # fmt: skip
        given = list(good)
        given[index] = wrong
        with pytest.raises(RuntimeError, match=r"easytorch: (multi_latent|ragged_page|attention)"):
            operator(*given)


def read_up_to_guard_pages() -> None:
    torch.manual_seed(0)
    for level in range(len(library.LEVELS)):
        for dtype in cpu_pages.DTYPES:
            for widths in ((36, 10, 30, 20), (33, 7, 9, 5), (63, 1, 65, 63), (1, 1, 1, 1)):
                batch = make([1, 4], [70, 10], 5, 8, dtype, widths=widths)
                pools = batch.latent_pages.split(list(widths[:2]), -1)  # type: ignore[union-attr]
                # of the pages the last slot of the last one in use is the last of its pool
                made = [guarded(x) if isinstance(x, torch.Tensor) else x for x in batch]
                made[2] = tuple(guarded(x.contiguous()) for x in pools)
                check(Batch(*made), level, {"sinks": guarded(torch.randn(5))})  # type: ignore[arg-type]


@needs_library
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages by mprotect")
def test_nothing_is_read_past_the_end() -> None:
    """In a process of its own, which a fault would end."""
    program = "from tests.kernels.multi_latent.test_cpu_pages import read_up_to_guard_pages as run; run()"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
