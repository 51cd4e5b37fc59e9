"""Gradients of the recurrences in C++: every instruction set this CPU has, odd sizes, documents, any layout, buffers
with a guard page behind them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.cpu import library
from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded
from tests.kernels.recurrence.test_cpu import as_, in_cpp, needs_library
from tests.operations.test_state_space import DEFINITION, DTYPES, OPERATIONS, arguments, floating, segments

LEVELS = pytest.mark.parametrize("level", library.levels_of("ssm1"))


def upstream(results: tuple[Tensor, Tensor]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(x.shape, generator=draw).to(x.dtype) for x in results]


def gradients(
    run: Callable[..., tuple[Tensor, Tensor]], given: dict[str, Any], grads: list[Tensor] | None = None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The gradients of the outputs and the last state that were used, and of each floating argument."""
    leaves = {n: v.detach().requires_grad_() for n, v in given.items() if floating(v)}
    results = run(**{**given, **leaves})
    grads = upstream(results) if grads is None else [g.to(x.dtype) for g, x in zip(grads, results, strict=True)]
    found = torch.autograd.grad(results, list(leaves.values()), grads)
    return grads, dict(zip(leaves, found, strict=True))


def check(
    name: str, given: dict[str, Any], buffers: dict[str, Any], level: int, dtype: torch.dtype, *case: Any
) -> None:
    grads, got = gradients(lambda **x: in_cpp(name, x, level), buffers)
    wide = {n: v.double() if floating(v) else v for n, v in given.items()}
    _, wanted = gradients(DEFINITION[name], wide, grads)
    for field, one in got.items():
        assert one.shape == wanted[field].shape and one.dtype == given[field].dtype, (field, *case)
        assert relative_rms_error(one, wanted[field]) <= 2 * TOLERANCE[dtype], (field, *case)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@LEVELS
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_level_and_argument(name: str, level: int, dtype: torch.dtype) -> None:
    """Around the ends of chunks, with documents every other time; the state that is given and that which is left."""
    for number, length in enumerate((1, 2, 15, 16, 17, 48, 100)):
        given = as_(arguments(name, length), dtype)
        if number % 2:
            given["segment_ids"] = segments(length)
        buffers = {n: guarded(v) if isinstance(v, Tensor) else v for n, v in given.items()}
        check(name, given, buffers, level, dtype, length)


@needs_library
@pytest.mark.parametrize("decay", [1.0, 300.0])
def test_heads_groups_and_widths_of_ssm2(decay: float) -> None:
    """Several heads a lane, widths of no vector and of several, D for heads, no gate; decays that pass through
    subnormal numbers on their way to 0 across a chunk of 48."""
    for heads, groups, width, size, batch in (
        (20, 1, 33, 17, 1),
        (1, 1, 1, 1, 3),
        (6, 3, 70, 5, 2),
        (9, 1, 16, 128, 1),
    ):
        r = functools.partial(torch.randn, generator=torch.Generator().manual_seed(heads))
        given = {
            "x": r(batch, 110, heads, width), "dt": r(batch, 110, heads).exp() / 50, "A": -decay * r(heads).exp(),
            "B": r(batch, 110, groups, size), "C": r(batch, 110, groups, size), "D": r(heads),
            "initial_state": r(batch, heads, width, size),
        }  # fmt: skip
        if heads == 9:
            del given["D"], given["initial_state"]
            given["z"] = r(batch, 110, heads, width)
        check("ssm2", given, given, library.BEST, torch.float32, heads)


@needs_library
@pytest.mark.parametrize("name", ("ssm1", "ssm2", "gated_delta_rule"))
def test_subnormal_numbers_are_back_after_a_call(name: str) -> None:
    gradients(lambda **x: in_cpp(name, x, library.BEST), arguments(name, 20))
    assert float(torch.tensor([1e-39]) * torch.tensor([0.5])) > 0


@needs_library
@pytest.mark.parametrize("name", OPERATIONS)
def test_any_layout(name: str) -> None:
    given = arguments(name, 35)
    views: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :], lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: torch._neg_view(-x),
    )  # fmt: skip
    for view in views:
        strided = {n: view(v) if floating(v) and v.dim() > 1 else v for n, v in given.items()}
        check(name, given, strided, library.BEST, torch.float32)


@needs_library
@pytest.mark.parametrize("name", OPERATIONS)
def test_several_threads_give_the_bits_of_one(name: str) -> None:
    given, results, threads = arguments(name, 300), [], torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(gradients(lambda **x: in_cpp(name, x, library.BEST), given)[1])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0][field], results[1][field]) for field in results[0])


@needs_library
@pytest.mark.parametrize("name", OPERATIONS)
def test_only_what_is_read_or_asked_for_and_every_order(name: str) -> None:
    operation = OperationRegistry.create(name, OperationMetadata(backend="cpu"))
    given = arguments(name, 9)
    names = [n for n, v in given.items() if floating(v)]
    for asked in names:
        leaf = given[asked].clone().requires_grad_()
        for field in ("outputs", "final_state"):
            got, expected = torch.zeros_like(leaf), torch.zeros_like(leaf)
            read = getattr(operation(**{**given, asked: leaf}), field)
            if read.requires_grad:
                (got,) = torch.autograd.grad(read.sum(), leaf)
            read = DEFINITION[name](**{**given, asked: leaf})[field == "final_state"]
            if read.requires_grad:
                (expected,) = torch.autograd.grad(read.sum(), leaf)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    leaves = {n: given[n].clone().requires_grad_() for n in names}

    def penalty(run: Callable[..., Any]) -> list[Tensor]:
        outputs = run(**{**given, **leaves})
        first = torch.autograd.grad(outputs.square().sum(), list(leaves.values()), create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), list(leaves.values())))

    got = penalty(lambda **x: operation(**x).outputs)
    for one, wanted in zip(got, penalty(lambda **x: DEFINITION[name](**x)[0]), strict=True):
        assert relative_rms_error(one, wanted) <= 1e-4


@needs_library
@pytest.mark.parametrize("name", OPERATIONS)
def test_autocast_changes_nothing(name: str) -> None:
    operation, given = OperationRegistry.create(name), arguments(name, 40)

    def run(**tensors: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            assert operation.choose(**tensors).backend == "cpu"
            found = operation(**tensors)
        return found.outputs, found.final_state

    grads, plain = gradients(lambda **x: in_cpp(name, x, library.BEST), given)
    for field, one in gradients(run, given, grads)[1].items():
        assert torch.equal(one, plain[field]), field


@needs_library
@pytest.mark.parametrize("name", OPERATIONS)
def test_checkpointing_and_a_compiled_step(name: str) -> None:
    operation = OperationRegistry.create(name)
    given = arguments(name, 40)
    leaves = {n: v.clone().requires_grad_() for n, v in given.items() if floating(v)}

    def outputs(**tensors: Tensor) -> Tensor:
        found: Tensor = operation(**{**given, **tensors}).outputs
        return found

    plain = torch.autograd.grad(outputs(**leaves).sum(), list(leaves.values()))
    again = torch.utils.checkpoint.checkpoint(outputs, use_reentrant=False, **leaves)
    compiled = torch.compile(outputs, backend="aot_eager")(**leaves)
    for other in (again, compiled):
        found = torch.autograd.grad(other.sum(), list(leaves.values()))
        for one, wanted in zip(found, plain, strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


@needs_library
def test_the_operators_refuse_what_does_not_fit() -> None:
    none, no_ids = torch.empty(0), torch.empty(0, dtype=torch.int64)
    query, value, g = torch.ones(1, 4, 2, 5), torch.ones(1, 4, 4, 3), torch.ones(1, 4, 4)
    call = (value, none, query, query, value, g, g, none, no_ids)
    for change, why in (
        ({0: value[:, :3]}, "the gradient is"), ({0: none}, "takes the gradient"),
        ({0: value.double()}, "the gradient is"),
        ({1: torch.ones(1, 4, 5, 4)}, "state's gradient is"), ({3: query[..., :4]}, "key is"),
        ({5: g[..., :3]}, "g is"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=why):
            torch.ops.easytorch_cpu.gated_delta_rule_backward.default(
                *{**dict(enumerate(call)), **change}.values(), 1.0, library.BEST
            )
    x, gates, B = torch.ones(1, 4, 6, 2), torch.ones(1, 4, 6), torch.ones(1, 4, 3, 5)
    call = (x, none, x, gates, torch.ones(6), B, B, torch.ones(6), x, x, none, no_ids)
    for change, why in (
        ({0: x[:, :3]}, "the gradient is"), ({0: none}, "takes the gradient"), ({0: x.double()}, "the gradient is"),
        ({1: torch.ones(1, 6, 2, 4)}, "state's gradient is"), ({4: torch.ones(5)}, "A is"), ({6: B[:, :3]}, "C is"),
        ({7: torch.ones(6, 3)}, "D is"), ({9: none}, "before the gate"), ({8: none}, "before the gate"),
        ({9: x[..., :1]}, "before the gate are"), ({10: torch.ones(1, 6, 2, 4)}, "state is"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=why):
            torch.ops.easytorch_cpu.ssm2_backward.default(*{**dict(enumerate(call)), **change}.values(), library.BEST)


def test_the_arguments_are_those_of_the_definition() -> None:
    for name in OPERATIONS:
        assert {n for n, v in arguments(name, 3).items() if floating(v)} <= set(
            inspect.signature(DEFINITION[name]).parameters
        )
