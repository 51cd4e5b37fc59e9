"""The interruption or the cause behind an error that a library raised of its own."""

from __future__ import annotations

import pytest

from easytorch.bridge.core.interruptions import causes, interruption_of


def raised(*links: BaseException) -> BaseException:
    """The last of `links`, each raised while the one before it was handled."""
    try:
        if links[:-1]:
            raise raised(*links[:-1])
    except BaseException:
        try:
            raise links[-1]
        except BaseException as error:
            return error
    return links[-1]


def test_causes_end_before_what_the_caller_was_handling() -> None:
    outer, full, closed = ValueError("outer"), OSError("full"), RuntimeError("closed")
    error = raised(outer, full, closed)
    assert list(causes(error)) == [closed, full, outer]
    assert list(causes(error, outer)) == [closed, full]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SystemExit(143)])
def test_the_interruption_is_found(interruption: BaseException) -> None:
    assert interruption_of(raised(interruption, RuntimeError("closed"))) is interruption
    assert interruption_of(raised(OSError("full"), RuntimeError("closed"))) is None
    error = raised(interruption, RuntimeError("closed"))
    assert interruption_of(error, interruption) is None
