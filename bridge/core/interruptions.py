"""Ctrl-C and the signals that the command line takes like it: what their handlers raise, wherever the program is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

# What handlers of signals raise: Python's of SIGINT, and those of the command line.
INTERRUPTIONS = (KeyboardInterrupt, SystemExit)


def uninterrupted(action: Callable[[], object]) -> None:
    """Calls `action` again until no signal interrupts it, and only then raises what the first one raised."""
    interruption: BaseException | None = None
    while True:
        try:
            action()
            break
        except INTERRUPTIONS as error:
            interruption = interruption or error
    if interruption is not None:
        raise interruption


def interruption_of(error: BaseException, outer: BaseException | None = None) -> BaseException | None:
    """The interruption behind another error that a library raised: while it closed its file, or was imported.

    outer: what the caller was handling before, which is no cause of the error.
    """
    return next((link for link in causes(error, outer) if isinstance(link, INTERRUPTIONS)), None)


def causes(error: BaseException | None, outer: BaseException | None = None) -> Iterator[BaseException]:
    """An error and those that were being handled when it was raised, up to `outer`."""
    while error is not None and error is not outer:
        yield error
        error = error.__context__
