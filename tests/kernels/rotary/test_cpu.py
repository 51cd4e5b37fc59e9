"""rotary by the operator in C++: every instruction set this CPU has, odd sizes, any layout, the definition's bits."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.rotary import cpu, native
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rotary(backend: str | None = None) -> OperationImpl:
    return OperationRegistry.create("rotary", OperationMetadata(backend=backend))


def numbers(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", library.levels_of("rotary"))
def test_odd_sizes_have_the_bits_of_the_definition(level: int, dtype: torch.dtype) -> None:
    for batch, tables, tokens, heads, kv_heads, dim, turned in (
        (1, 1, 1, 4, 2, 64, 64), (2, 1, 3, 1, 1, 2, 2), (2, 2, 5, 3, 1, 60, 38), (3, 3, 1, 2, 2, 33, 16),
        (1, 1, 2, 2, 1, 7, 0), (1, 1, 4, 5, 5, 256, 128),
    ):  # fmt: skip
        given = numbers(
            (batch, tokens, heads, dim), (batch, tokens, kv_heads, dim), (tables, tokens, turned),
            (tables, tokens, turned), dtype=dtype, seed=level,
        )  # fmt: skip
        got = cpu.run(*(guarded(x) if x.numel() else x for x in given), level)
        expected, wide = native.rotary(*given), native.rotary(*(x.double() for x in given))
        for a, b, c in zip(got, expected, wide, strict=True):
            assert a.is_contiguous() and relative_rms_error(a, c) <= TOLERANCE[dtype]
            if dtype.itemsize == 2:
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layout(dtype: torch.dtype) -> None:
    (wide,) = numbers((4, 12, 6, 80), dtype=dtype)
    heads = [
        wide[:2, :5, :, :32], wide.transpose(1, 2)[:2, :5, :, :32], wide[:2, :5, :, ::2][..., :32],
        wide[:1, :5, :, 3:35].expand(2, 5, 6, 32), wide[:2, :1, :, :32].expand(2, 5, 6, 32), wide[:2, :0, :, :32],
        wide[:0, :5, :, :32], wide[:2, :5, :0, :32], torch._neg_view(wide[:2, :5, :, :32]),
    ]  # fmt: skip
    for query in heads:
        for key in (query, query[:, :, 1:3], query[:, :, ::2]):
            batch, tokens = query.shape[:2]
            for table in (
                wide[0, :tokens, 0, :32][None],
                wide[:batch, :tokens, 0, ::2][..., :20],
                wide[2:3, :tokens, 1, :6],
            ):
                if table.shape[0] not in (1, batch):
                    continue
                cos, sin = table, table.flip(-1)
                got = rotary("cpu")(query, key, cos, sin)
                for a, b in zip(got, native.rotary(query, key, cos, sin), strict=True):
                    torch.testing.assert_close(a, b)
    positions = torch.tensor([[3, 0, 4, 4, 1]])
    table = wide[0, :, 0, :32]
    for options in ({"position_ids": positions}, {"offset": 2}):
        got = rotary("cpu")(heads[0], heads[0], table, table, **options)
        torch.testing.assert_close(got, native.rotary(heads[0], heads[0], table, table, **options))


@needs_library
@pytest.mark.parametrize("level", library.levels_of("rotary"))
def test_infinities_and_nan_are_the_definitions(level: int) -> None:
    for dtype in DTYPES:
        query, key, cos, sin = numbers((1, 2, 3, 34), (1, 2, 1, 34), (1, 2, 34), (1, 2, 34), dtype=dtype)
        query[0, 0, 0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), torch.finfo(dtype).max])
        sin[0, 1, 5], cos[0, 0, 20], cos[0, 0, :3] = float("nan"), float("inf"), 0.0
        for a, b in zip(cpu.run(query, key, cos, sin, level), native.rotary(query, key, cos, sin), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_the_definitions(dtype: torch.dtype) -> None:
    """Tables whose halves differ, heads that turn in part, one input that needs no gradient, and gradients of these."""
    for turned, needs in ((32, (True, True)), (20, (True, False)), (20, (False, True))):
        query, key, cos, sin, *upstream = numbers(
            (2, 5, 4, 32), (2, 5, 2, 32), (1, 5, turned), (1, 5, turned), (2, 5, 4, 32), (2, 5, 2, 32), dtype=dtype
        )
        found = []
        for compute, wide in ((cpu.rotary, False), (native.rotary, True)):
            given = [x.double() if wide else x.clone() for x in (query, key, cos, sin)]
            leaves = [x.requires_grad_() for x, need in zip(given[:2], needs, strict=True) if need]
            turned_query, turned_key = compute(*given)
            total = sum(
                (one * way.to(one.dtype)).sum() for one, way in zip((turned_query, turned_key), upstream, strict=True)
            )
            first = torch.autograd.grad(total, leaves, retain_graph=True)
            again = torch.autograd.grad(
                turned_query.square().sum() + turned_key.square().sum(), leaves, create_graph=True
            )
            second = torch.autograd.grad(sum(one.square().sum() for one in again), leaves)
            found.append((*first, *again, *second))
        for a, b in zip(*found, strict=True):
            assert relative_rms_error(a.detach(), b.detach()) <= 4 * TOLERANCE[dtype]


@needs_library
def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    operation = rotary()
    for dtype in DTYPES:
        query, key, table = numbers((2, 1, 4, 32), (2, 1, 2, 32), (1, 1, 32), dtype=dtype)
        assert operation.choose(query, key, table, table).backend == "cpu"
        assert operation.choose(query, key, table, table, interleaved=False).backend == "cpu"
        assert operation.choose(query, key, table, table, interleaved=True).backend == "aten"
        assert operation.choose(query, key, table[0], table[0], offset=0).backend == "aten"
        assert operation.choose(query.requires_grad_(), key, table, table).backend == "aten"  # few to learn
        query, key, table = numbers((2, 64, 16, 32), (2, 64, 2, 32), (1, 64, 32), dtype=dtype)
        assert operation.choose(query.requires_grad_(), key, table, table).backend == "cpu"
        assert operation.choose(query, key, table, table.clone().requires_grad_()).backend == "native"
    query, key, table = numbers((2, 1, 4, 32), (2, 1, 2, 32), (1, 1, 32), dtype=torch.bfloat16)
    assert operation.choose(query, key, table.float(), table.float()).backend == "aten"
    with pytest.raises(ValueError, match="rotary takes"):
        operation(query, key, table[:, :, :31], table)
    monkeypatch.setattr(processor, "AVX2", False)
    assert operation.choose(query, key, table, table).backend == "aten"


@needs_library
def test_a_forced_call_that_it_does_not_take_is_refused() -> None:
    query, table = numbers((2, 1, 4, 32), (1, 1, 32), dtype=torch.float32)
    for given, options, why in (
        ((query, query, table, table), {"interleaved": True}, "not pairs"),
        ((query.double(), query.double(), table.double(), table.double()), {}, "float64"),
        ((query.half(), query.half(), table, table), {}, "one dtype"),
        ((query, query, table, table.clone().requires_grad_()), {}, "gradients of the tables"),
    ):
        with pytest.raises(UnsupportedOperationError, match=why):
            rotary("cpu")(*given, **options)
        with pytest.raises(NotImplementedError, match=why):
            cpu.rotary(*given, **options)


@needs_library
def test_the_operator_refuses_what_does_not_fit() -> None:
    """By itself, past every check in Python: nothing is read beyond a tensor."""
    query, key, table = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 2, 8), torch.ones(2, 3, 8)
    operator = torch.ops.easytorch_cpu.rotary.default
    good = [query, key, table, table]
    assert operator(*good, library.BEST)[1].shape == key.shape
    apart = torch.ones(2, 3, 16)[..., ::2]
    for places, wrong in (
        ((0,), query[:1]), ((0,), query[:, :2]), ((0,), query[..., :4]), ((0,), query[0]), ((0,), query.double()),
        ((0,), query.repeat(1, 1, 1, 2)[..., ::2]), ((1,), key[:, :2]), ((1,), key.bfloat16()), ((1,), key[..., :6]),
        ((2,), table[:1]), ((3,), table[:, :2]), ((3,), table[..., :4]), ((3,), table.half()), ((2,), apart),
        ((3,), apart),
        ((2, 3), table[:, :2]), ((2, 3), table[:, :1]), ((2, 3), table[..., :7]), ((2, 3), torch.ones(2, 3, 10)),
        ((2, 3), torch.ones(3, 3, 8)), ((2, 3), table[0]),
    ):  # fmt: skip
        given = [wrong if place in places else one for place, one in enumerate(good)]
        with pytest.raises(RuntimeError, match="easytorch: rotary"):
            operator(*given, library.BEST)
