"""What the operators in C++ leave to ATen: every question that chooses one is asked in every state of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from easytorch.kernels.cpu import inference, library, processor
from easytorch.kernels.decode import cpu as decode
from easytorch.kernels.linear import cpu as linear
from easytorch.kernels.linear import preference
from easytorch.kernels.rms_norm import cpu as rms_norm
from easytorch.kernels.rotary import cpu as rotary

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
Asked = Callable[[Tensor], bool]
# of x (1, 256): whether the operator would be called
QUESTIONS: dict[str, Asked] = {
    "refusal": lambda x: inference.refusal([x, None, 3]) is None,
    "linear": lambda x: linear.prefers(x, torch.ones(512, 256), None),
    "decode": lambda x: decode.takes(*[x.reshape(1, 1, 1, 256)] * 3),
    "rms_norm": lambda x: rms_norm.prefers(x, None, 1e-6),
    "rotary": lambda x: rotary.prefers(*[x.reshape(1, 1, 1, 256)] * 2, *[torch.ones(1, 1, 256)] * 2),
}
ELEMENTWISE = ("rms_norm", "rotary")  # autocast casts none of their steps


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_autocast(ask: Asked) -> bool:
    with torch.autocast("cpu", torch.bfloat16):
        return ask(torch.ones(1, 256))


def under_a_mode(ask: Asked) -> bool:
    with Watching():
        return ask(torch.ones(1, 256))


def with_a_gradient(ask: Asked) -> bool:
    return ask(torch.ones(1, 256, requires_grad=True))


def with_a_forward_gradient(ask: Asked) -> bool:
    with torch.autograd.forward_ad.dual_level():
        return ask(torch.autograd.forward_ad.make_dual(torch.ones(1, 256), torch.ones(1, 256)))


def _within(run: Callable[[Callable[[Tensor], Tensor]], object], ask: Asked) -> bool:
    answers: list[bool] = []

    def asking(x: Tensor) -> Tensor:
        answers.append(ask(x.reshape(1, 256)))
        return x * 1.0

    run(asking)
    assert answers, "the question was not asked"
    return any(answers)


def in_vmap(ask: Asked) -> bool:
    return _within(lambda asking: torch.func.vmap(asking)(torch.ones(2, 256)), ask)


def in_jvp(ask: Asked) -> bool:
    return _within(lambda asking: torch.func.jvp(asking, (torch.ones(256),), (torch.ones(256),)), ask)


def in_a_trace(ask: Asked) -> bool:
    return _within(lambda asking: torch.jit.trace(asking, torch.ones(256), check_trace=False), ask)


def of_a_subclass(ask: Asked) -> bool:
    return ask(torch.ones(1, 256).as_subclass(type("Other", (Tensor,), {})))


def elsewhere(ask: Asked) -> bool:
    return ask(torch.ones(1, 256).double())


STATES = (under_a_mode, with_a_gradient, with_a_forward_gradient, in_vmap, in_jvp, in_a_trace)


@needs_library
@pytest.mark.parametrize("name", QUESTIONS)
def test_in_every_state_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    monkeypatch.setattr(preference, "ONE_FLOAT32_ROW", True)
    ask = QUESTIONS[name]
    assert ask(torch.ones(1, 256)), "without a reason, it is taken"
    with torch.no_grad():
        assert ask(torch.ones(1, 256, requires_grad=True))
    assert in_autocast(ask) == (name in ELEMENTWISE)
    taken = [state.__name__ for state in STATES if state(ask)]
    assert not taken, f"{name} would be called {', '.join(taken)}"


@needs_library
@pytest.mark.parametrize("name", ["refusal", "linear", "rms_norm", "rotary"])
def test_other_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    assert not of_a_subclass(QUESTIONS[name])
    assert name == "refusal" or not elsewhere(QUESTIONS[name])


ROWS, MATRIX, BIAS = torch.ones(2, 512), torch.ones(512, 512), torch.ones(512)
HEADS, TABLE = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 8)
FITTING: dict[str, tuple[Callable[..., bool], tuple[Any, ...], tuple[tuple[int, Any], ...]]] = {
    "linear": (
        linear.prefers,
        (ROWS, MATRIX, BIAS),
        (
            (0, ROWS[:, :256]), (0, torch.ones(1, 1024)), (0, ROWS.bfloat16()), (0, torch.tensor(1.0)),
            (0, ROWS.to("meta")), (0, ROWS.to_sparse()), (1, MATRIX.bfloat16()), (1, MATRIX[None]), (1, MATRIX[0]),
            (1, MATRIX.to("meta")), (1, MATRIX.to_sparse()), (2, BIAS.bfloat16()), (2, BIAS[:256]), (2, BIAS[None]),
            (2, BIAS.to("meta")), (2, BIAS.to_sparse()),
        ),
    ),
    "rms_norm": (
        rms_norm.prefers,
        (ROWS, BIAS, 1e-6),
        (
            (0, torch.tensor(1.0)), (0, ROWS.double()), (0, ROWS.to("meta")), (0, ROWS[:, :64]), (1, BIAS[:256]),
            (1, BIAS[None]), (1, BIAS.bfloat16()), (1, BIAS.to("meta")), (2, -1e-6), (2, 1), (2, torch.tensor(1e-6)),
        ),
    ),
    "rotary": (
        rotary.prefers,
        (HEADS, HEADS, TABLE, TABLE),
        (
            (0, HEADS[:1]), (0, HEADS[:, :1]), (0, HEADS[..., :4]), (0, HEADS[0]), (0, HEADS.double()),
            (0, HEADS.to("meta")), (1, HEADS[:1]), (1, HEADS[..., :6]), (1, HEADS.half()), (1, HEADS.to("meta")),
            (2, TABLE[..., :4]), (2, TABLE[:, :2]), (2, TABLE.half()), (2, TABLE.to("meta")), (3, TABLE[:1]),
            (3, TABLE.half()), (3, TABLE.to("meta")), (23, torch.ones(3, 3, 8)), (23, TABLE[:, :2]),
            (23, TABLE[..., :7]), (23, torch.ones(2, 3, 10)), (23, TABLE[0]), (23, TABLE[:, :1]),
        ),
    ),
}  # fmt: skip


@needs_library
@pytest.mark.parametrize("name", FITTING)
def test_what_does_not_fit_is_not_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who ask call the operator right away, which checks what it reads, and not what it means."""
    monkeypatch.setattr(processor, "AVX2", True)
    prefers, good, wrong = FITTING[name]
    assert prefers(*good)
    for place, one in wrong:
        places = (2, 3) if place == 23 else (place,)
        given = [one if number in places else kept for number, kept in enumerate(good)]
        assert not prefers(*given), (place, getattr(one, "shape", one))
