"""What another library's model can fail with when it is made small and given made-up inputs."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError, OSError,
    RuntimeError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


def first_line(error: BaseException) -> str:
    """The kind of the error and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
