"""The exceptions that backends raise."""

from __future__ import annotations


class BackendError(ValueError):
    """A computation that cannot be built or run: the message names the operation, the shapes, and what to do."""


class OpNotImplementedError(BackendError, NotImplementedError):
    """An operation, or an operation of this element type, that a backend does not have."""
