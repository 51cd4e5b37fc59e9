"""`easytorch`: the entry point, its global options, and error handling."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from easytorch import __version__
from easytorch.cli.lazy import CONTEXT, LazyGroup, add_commands
from easytorch.missing_packages import what_to_install
from easytorch.output_encoding import escape_unencodable
from easytorch.switches import switch

# Errors that EasyTorch raises on purpose, and those that Python raises for bad input: CheckpointError and
# UnsupportedOperationError are ValueErrors, a missing folder an OSError, a missing optional package an ImportError.
USER_ERRORS = (ValueError, OSError, ImportError)

app = typer.Typer(
    name="easytorch",
    cls=LazyGroup,
    context_settings=CONTEXT,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Torch models on TPU, GPU and CPU, and their weights both ways to JAX/Flax.",
)
add_commands(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"easytorch {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (also EASYTORCH_TRACEBACK=1).")
    ] = False,
) -> None:
    if debug:
        os.environ["EASYTORCH_TRACEBACK"] = "1"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line on `arguments` (those of the process by default) and exit.

    Exit codes: 0 done, 1 a command that found what it looks for wrong or an unexpected error, 2 wrong usage or input,
    128 + the signal's number when a signal ended it (130: Ctrl-C).
    """
    escape_unencodable()
    try:
        switch("EASYTORCH_TRACEBACK")  # reports an invalid value now, not while another error is shown
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        with _ended_as_by_ctrl_c():
            app(args=None if arguments is None else list(arguments), prog_name="easytorch")
    except Exception as error:  # the boundary of the process
        # A package that is interrupted while it is imported, or while it writes, may raise an error of its own.
        if (interruption := _interruption(error)) is not None:
            sys.exit(interruption.code if isinstance(interruption, SystemExit) else 128 + signal.SIGINT)
        if not isinstance(error, USER_ERRORS) or switch("EASYTORCH_TRACEBACK"):
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP, which end Python on the spot, run its `finally` blocks: no half-written file stays behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    # Only the main thread may set handlers; existing and ignored ones (nohup) are kept.
    free = [name for name in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(name) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        free = []
    for name in free:
        signal.signal(name, leave)
    try:
        yield
    finally:
        for name in free:
            signal.signal(name, signal.SIG_DFL)


def _interruption(error: Exception) -> BaseException | None:
    from easytorch.bridge.core.interruptions import interruption_of

    found: BaseException | None = interruption_of(error)
    return found


def _one_line(error: BaseException) -> str:
    if (text := what_to_install(error)) is not None:
        return text
    from easytorch.bridge.core.printable import printable

    # It may contain names of files, tensors and classes from an untrusted checkpoint.
    text = printable(" ".join(str(error).split()))
    return text or type(error).__name__
