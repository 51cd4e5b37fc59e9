"""What a third-party model may raise when it is built, shrunk or run on synthetic inputs, and how deep one is built."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

# Modules are made one by one, without memory too: above this a slip of the pen would keep a machine busy for hours.
MOST_LAYERS = 10_000

FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError, OSError,
    RuntimeError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


def first_line(error: BaseException) -> str:
    """The kind of the error and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
