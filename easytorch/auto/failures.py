"""The exceptions that a third-party model may raise when it is shrunk and run on synthetic inputs."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError, OSError,
    RuntimeError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


def first_line(error: BaseException) -> str:
    """The kind of the error and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
