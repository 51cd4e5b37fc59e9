"""What a repeated call runs: operators of torch, one after another, that need no code of Python between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Given(NamedTuple):
    """The tensor at a place of the call, among an operator's arguments."""

    place: int


class _Result:
    """The first result of the operator before, among an operator's arguments."""

    def __repr__(self) -> str:
        return "RESULT"


RESULT = _Result()
GIVEN = tuple(map(Given, range(4)))


class Operator(NamedTuple):
    """An operator by its name, and every argument of its schema: a `Given`, `RESULT`, or what is always the same, which
    may be a number, text, None, a tuple of integers or a tensor."""

    name: str
    arguments: tuple[Any, ...]
    overload: str = ""


class Output(NamedTuple):
    """The type of the object that the result is given in, and its attributes; the first is the result."""

    type: type
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Steps:
    """`run(*tensors)`, and operators that compute the same.

    given_turned, result_turned: whether (B, T, H, D) are seen as (B, H, T, D) in the tensors given and in the result.
    switches: functions that must still give these very objects, or (module, name) of attributes that must still be
    them: of functions of torch that `run` calls and the operators do not. Where one differs, `run` is called.
    """

    run: Callable[..., Any]
    operators: tuple[Operator, ...]
    given_turned: bool = False
    result_turned: bool = False
    switches: Mapping[Any, Any] = field(default_factory=dict)
    output: Output | None = None

    def __call__(self, *tensors: Any) -> Any:
        return self.run(*tensors)
