"""Rows of logits in C++: every instruction set, odd sizes, extreme logits, bad input, and no other memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from easytorch.kernels.cpu import library
from easytorch.kernels.cross_entropy import chunk, cpu, native
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")

SETTINGS = (
    {}, {"label_smoothing": 0.1}, {"softcap": 3.0}, {"z_loss": 1e-2},
    {"label_smoothing": 1.0, "softcap": 2.0, "z_loss": 0.3},
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def expected(logits: torch.Tensor, labels: torch.Tensor, factors: torch.Tensor, **settings: Any) -> Any:
    wide = logits.double().requires_grad_()
    losses = native.cross_entropy(wide, labels, reduction="none", ignore_index=-7, **settings)
    return losses.detach(), torch.autograd.grad(losses, wide, factors.double())[0]


def all_of(settings: dict[str, Any]) -> tuple[Any, ...]:
    return -7, settings.get("label_smoothing", 0.0), settings.get("softcap"), settings.get("z_loss", 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_instruction_set_gives_the_definition(settings: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, vocabulary, size in (
        (1, 1, 1.0),
        (3, 7, 1.0),
        (5, 16, 30.0),
        (4, 33, 3.0),
        (3, 4097, 2.0),
        (2, 9000, 9.0),
    ):
        logits = (size * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
        labels = torch.randint(0, vocabulary, (rows,), generator=generator)
        labels[rows // 2 :: 3] = -7
        factors = torch.randn(rows, generator=generator)
        want, gradient = expected(logits, labels, factors, **settings)
        for level in range(library.BEST + 1):
            given = logits.clone()
            assert torch.equal(
                cpu.step(given, labels, None, *all_of(settings), level)[0], found_at(given, labels, settings, level)
            )
            assert torch.equal(given, logits), "without factors the logits stay"
            losses, grad = cpu.step(given, labels, factors, *all_of(settings), level)
            assert grad is given and losses.dtype == torch.float32
            torch.testing.assert_close(losses.double(), want, rtol=3e-6, atol=3e-6)
            assert relative_rms_error(grad, gradient) < TOLERANCE[dtype]
            assert torch.equal(grad[labels == -7], torch.zeros_like(grad[labels == -7]))


def found_at(logits: torch.Tensor, labels: torch.Tensor, settings: dict[str, Any], level: int) -> torch.Tensor:
    return cpu.step(logits.clone(), labels, torch.ones(len(labels)), *all_of(settings), level)[0]


def test_extreme_logits() -> None:
    """A sure row has no loss but its distance; what is masked weighs nothing; NaN and infinity are not hidden."""
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([
        [1e6, 1e6 - 1, 0, -1e6, 5], [-inf, 2, -inf, 1, -inf], [300, 0, 0, 0, 0], [nan, 0, 1, 2, 3], [inf, 0, 1, 2, 3],
        [-inf] * 5, [0, 1, 2, 3, nan], [-3e38, 3e38, 0, 0, 0],
    ])  # fmt: skip
    labels = torch.tensor([1, 3, 2, 1, 1, 0, 0, 1])
    want, gradient = expected(rows, labels, torch.ones(len(rows)))
    for level in range(library.BEST + 1):
        losses, grad = cpu.step(rows.clone(), labels, torch.ones(len(rows)), *all_of({}), level)
        torch.testing.assert_close(losses.double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(grad.double(), gradient, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_nothing_outside_the_rows_is_touched() -> None:
    for dtype in DTYPES:
        for vocabulary in (1, 15, 17, 40):
            for rows in (1, 3):
                logits = guarded(torch.randn(rows, vocabulary).to(dtype))
                labels, factors = guarded(torch.zeros(rows, dtype=torch.int64)), guarded(torch.ones(rows))
                for level in range(library.BEST + 1):
                    cpu.step(logits, labels, factors, *all_of({"softcap": 2.0}), level)
    wide = torch.randn(4, 20)
    inner = wide[:, 3:17]
    outside = wide.clone()
    cpu.step(inner, torch.zeros(4, dtype=torch.int64), torch.ones(4), *all_of({}))
    assert torch.equal(wide[:, :3], outside[:, :3]) and torch.equal(wide[:, 17:], outside[:, 17:])


def test_the_number_of_threads_changes_nothing() -> None:
    threads, logits, labels = torch.get_num_threads(), torch.randn(300, 700), torch.randint(0, 700, (300,))
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(cpu.step(logits.clone(), labels, torch.ones(300), *all_of({"z_loss": 0.1})))
    finally:
        torch.set_num_threads(threads)
    for losses, grad in found[1:]:
        assert torch.equal(losses, found[0][0]) and torch.equal(grad, found[0][1])


def test_the_operator_refuses_what_does_not_fit() -> None:
    logits, labels, factors = torch.zeros(3, 5), torch.tensor([0, 4, -7]), torch.ones(3)
    for wrong, why in (
        ((logits[0], labels, factors), "takes logits"), ((logits, labels[:2], factors), "takes logits"),
        ((logits.double(), labels, factors), "float32"), ((logits.t().contiguous().t(), labels, factors), "contiguous"),
        ((logits, labels.int(), factors), "int64"), ((logits, labels, factors[:2]), "upstream"),
        ((logits, labels, factors.double()), "upstream"), ((logits, labels + 1, factors), "label is not in"),
        ((logits, labels - 1, factors), "label is not in"), ((logits[:1].expand(3, 5), labels, factors), "overlap"),
        ((torch.zeros(3, 0), labels, factors), "takes logits"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=why):
            torch.ops.easytorch_cpu.cross_entropy_rows.default(*wrong, -7, 0.0, None, 0.0, library.BEST)


def test_a_chunk_of_plain_logits_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(cpu, "step", lambda *given: called.append(given) or (torch.zeros(2), None))
    labels, settings = torch.tensor([0, 1]), chunk.Settings(-100, 0.0, None, 0.0)
    chunk.step(torch.randn(2, 4), labels, None, settings)
    assert len(called) == 1
    for other in (torch.randn(2, 4).double(), torch.randn(4, 2).t()):
        chunk.step(other, labels, None, settings)
    assert len(called) == 1


def test_gradients_of_several_outputs_at_once() -> None:
    """`is_grads_batched` and the vectorized jacobian: autograd's own vmap runs no operator that writes in place."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(3, 7, generator=generator).requires_grad_(), torch.tensor([2, -7, 0])
    settings = {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.1, "reduction": "none", "ignore_index": -7}
    upstream = torch.randn(4, 3, generator=generator)
    found = [
        torch.autograd.grad(loss(logits, labels, **settings), logits, upstream, is_grads_batched=True)[0]
        for loss in (cpu.cross_entropy, native.cross_entropy)
    ]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(
            lambda rows: cpu.cross_entropy(rows, labels, **settings), logits, vectorize=True
        ),
        torch.autograd.functional.jacobian(lambda rows: native.cross_entropy(rows, labels, **settings), logits),
    )
