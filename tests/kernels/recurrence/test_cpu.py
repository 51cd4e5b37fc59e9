"""The recurrences by their operators in C++: every instruction set this CPU has, odd sizes, documents, any layout,
buffers with a guard page behind them. `tests/operations/test_state_space.py` holds them to the operations' contract."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.cpu import library, processor
from easytorch.operations import OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded
from tests.operations.test_state_space import DEFINITION, DTYPES, OPERATIONS, arguments, floating, segments

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
LEVELS = pytest.mark.parametrize("level", library.levels_of("ssm1"))
OPTIONAL = {"bias", "initial_state", "activation", "D", "z", "dt_bias", "dt_softplus", "dt_limit", "use_qk_l2norm"}


def in_cpp(name: str, given: dict[str, Any], level: int) -> tuple[Tensor, Tensor]:
    run: Callable[..., tuple[Tensor, Tensor]] = importlib.import_module(f"easytorch.kernels.{name}.cpu").run
    bound = inspect.signature(DEFINITION[name]).bind(**given)
    bound.apply_defaults()
    return run(*bound.args, level)


def check(name: str, given: dict[str, Any], got: tuple[Tensor, Tensor], dtype: torch.dtype, *case: Any) -> None:
    wanted = DEFINITION[name](**{n: v.double() if floating(v) else v for n, v in given.items()})
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    for result, want in zip(got, wanted, strict=True):
        assert result.shape == want.shape and result.is_contiguous()
        assert relative_rms_error(result, want) <= TOLERANCE[dtype], case


def as_(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {n: v.to(dtype) if floating(v) else v for n, v in given.items()}


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@LEVELS
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_length_at_every_level(name: str, level: int, dtype: torch.dtype) -> None:
    """Single steps, a few tokens, a chunk of 48 and its neighbours, three chunks; documents every other time."""
    for number, length in enumerate((1, 2, 3, 4, 47, 48, 49, 130)):
        given = as_(arguments(name, length), dtype)
        if number % 2:
            given["segment_ids"] = segments(length)
        buffers = {n: guarded(v) if isinstance(v, Tensor) else v for n, v in given.items()}
        check(name, given, in_cpp(name, buffers, level), dtype, length)


@needs_library
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("name", OPERATIONS)
def test_widths_that_fill_no_vector_and_several(name: str, length: int) -> None:
    r = torch.Generator().manual_seed(length)
    for n, p, s in ((1, 1, 1), (3, 70, 17), (2, 64, 128), (5, 17, 33)):
        shapes = {
            "causal_conv1d": {"x": (2, length, p), "weight": (p, n)},
            "ssm1": {"x": (2, length, p), "dt": (2, length, p), "A": (p, s), "B": (2, length, s), "C": (2, length, s)},
            "ssm2": {
                "x": (1, length, n, p), "dt": (1, length, n), "A": (n,), "B": (1, length, 1, s), "C": (1, length, 1, s),
                "D": (n,),
            },
            "gated_delta_rule": {
                "query": (1, length, 1, s), "key": (1, length, 1, s), "value": (1, length, n, p), "g": (1, length, n),
                "beta": (1, length, n),
            },
        }[name]  # fmt: skip
        given: dict[str, Any] = {field: torch.randn(shape, generator=r) for field, shape in shapes.items()}
        for field, factor in (("A", -1.0), ("g", -1.0), ("dt", 0.1), ("beta", 0.1)):
            if field in given:
                given[field] = factor * given[field].abs()
        if name == "gated_delta_rule":
            given["use_qk_l2norm"] = True
        check(name, given, in_cpp(name, given, library.BEST), torch.float32, n, p, s)


@needs_library
@pytest.mark.parametrize("name", OPERATIONS)
def test_any_layout(name: str) -> None:
    """Parts of one projection, transposed and expanded tensors, and numbers that do not lie side by side."""
    given = arguments(name, 50)
    for length in (50, 1):
        part = {n: v[:, :length] if floating(v) and v.shape[:2] == (2, 50) else v for n, v in given.items()}
        views: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :], lambda x: x.repeat_interleave(2, -1)[..., ::2],
            lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: torch._neg_view(-x),
        )  # fmt: skip
        for view in views:
            strided = {n: view(v) if floating(v) and v.dim() > 1 else v for n, v in part.items()}
            check(name, part, in_cpp(name, strided, library.BEST), torch.float32)
        alike = {n: v[:1].expand(v.shape) if floating(v) and v.shape[0] == 2 else v for n, v in part.items()}
        check(name, alike, in_cpp(name, alike, library.BEST), torch.float32)


@needs_library
@pytest.mark.parametrize("name", OPERATIONS)
def test_several_threads_give_the_bits_of_one(name: str) -> None:
    given, results, threads = arguments(name, 700), [], torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(in_cpp(name, given, library.BEST))
    finally:
        torch.set_num_threads(threads)
    for one, several in zip(*results, strict=True):
        assert torch.equal(one, several)


@needs_library
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_choice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    operation = OperationRegistry.create(name)
    for dtype in DTYPES:
        given = as_(arguments(name, 5), dtype)
        first = next(iter(given))
        assert operation.choose(**given).backend == "cpu"
        assert operation.choose(**given, segment_ids=segments(5)).backend == "cpu"
        recorded = {**given, first: given[first].clone().requires_grad_()}
        assert operation.choose(**recorded).backend == "cpu"
        with torch.no_grad():
            assert operation.choose(**recorded).backend == "cpu"
        assert operation.choose(**{**given, first: given[first].double()}).backend == "aten"
        assert operation.choose(**{n: v[:0] if n in ("x", "query") else v for n, v in given.items()}).backend == "aten"
    with torch.autocast("cpu", torch.bfloat16):
        assert operation.choose(**arguments(name, 5)).backend == "cpu"
    narrow = OperationRegistry.create(name, OperationMetadata(runtime_dtype=torch.bfloat16))
    assert narrow.choose(**arguments(name, 5)).backend == "aten"
    forced = OperationRegistry.create(name, OperationMetadata(backend="cpu"))
    with pytest.raises(UnsupportedOperationError, match="float64"):
        forced(**as_(arguments(name, 5), torch.float64))
    monkeypatch.setattr(processor, "AVX2", False)
    assert operation.choose(**arguments(name, 5)).backend == "aten"


@needs_library
def test_the_operators_refuse_what_does_not_fit() -> None:
    none, no_ids, ops = torch.empty(0), torch.empty(0, dtype=torch.int64), torch.ops.easytorch_cpu
    x, taps = torch.ones(1, 4, 6), torch.ones(6, 4)
    for given, why in (
        ((x[0], taps, none, none, no_ids), "takes x"), ((x, taps[:5], none, none, no_ids), "weight is"),
        ((x, taps, torch.ones(5), none, no_ids), "bias is"), ((x, taps, none, torch.ones(1, 6, 4), no_ids), "state is"),
        ((x, taps, none, none, no_ids.new_zeros(1, 5)), "documents are"), ((x.mT, taps, none, none, no_ids), "x is"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=why):
            ops.causal_conv1d.default(*given, True, 3)
    B, A = torch.ones(1, 4, 5), torch.ones(6, 5)
    for change, why in (
        ({1: x[:, :3]}, "dt is"), ({2: A[:5]}, "A is"), ({3: B[..., :4]}, "B is"), ({5: none.new_ones(5)}, "D is"),
        ({8: torch.ones(1, 6, 4)}, "state is"), ({0: x.double()}, "x is"),
    ):  # fmt: skip
        call = dict(enumerate((x, x, A, B, B, none, none, none, none, no_ids)))
        with pytest.raises(RuntimeError, match=why):
            ops.ssm1.default(*{**call, **change}.values(), True, 3)
    x, B = torch.ones(1, 4, 6, 2), torch.ones(1, 4, 3, 5)
    for change, why in (
        ({1: x[..., 0, :1]}, "dt is"), ({2: A[0]}, "A is"), ({3: B[:, :, :2]}, "C is"),
        ({5: torch.ones(6, 3)}, "D is"),
        ({8: torch.ones(1, 6, 2, 4)}, "state is"), ({3: torch.ones(1, 4, 4, 5)}, "multiple"),
    ):  # fmt: skip
        call = dict(enumerate((x, x[..., 0].contiguous(), A[:, 0].contiguous(), B, B, none, none, none, none, no_ids)))
        with pytest.raises(RuntimeError, match=why):
            ops.ssm2.default(*{**call, **change}.values(), True, 0.0, 1.0, 3)
    query, value, g = torch.ones(1, 4, 2, 5), torch.ones(1, 4, 4, 3), torch.ones(1, 4, 4)
    for change, why in (
        ({1: query[..., :4]}, "key is"), ({2: value[:, :, :3]}, "multiple"), ({3: g[..., :3]}, "g is"),
        ({4: g[:, :3]}, "beta is"), ({5: torch.ones(1, 4, 5, 4)}, "state is"),
    ):  # fmt: skip
        call = dict(enumerate((query, query, value, g, g, none, no_ids)))
        with pytest.raises(RuntimeError, match=why):
            ops.gated_delta_rule.default(*{**call, **change}.values(), 1.0, False, 1e-6, 3)
