"""The implementations of every operation by platform, installed or not: the table of `easytorch env` and `demo`."""

from __future__ import annotations

from typing import NamedTuple

from easytorch.kernels.cpu import library
from easytorch.kernels.repeated import library as repeated
from easytorch.operations.dispatch.impl import UnsupportedOperationError
from easytorch.operations.dispatch.metadata import OperationMetadata
from easytorch.operations.dispatch.platform import PLATFORMS
from easytorch.operations.dispatch.registry import OperationRegistry


class Row(NamedTuple):
    operation: str
    platform: str
    implementation: str
    backend: str
    reason: str


def choices(metadata: OperationMetadata | None = None) -> list[Row]:
    """One row for each registered operation and platform: the choice for its `typical_call`, without running it.

    EASYTORCH_OPS, `metadata` and the installed libraries are taken into account. A refused choice has "-" for
    implementation and backend, and the refusal as its reason.
    """
    rows = []
    for name in OperationRegistry.names():
        operation = OperationRegistry.create(name, metadata)
        call = operation.typical_call()
        if name != operation.primary_name() or call is None:
            continue
        for platform in PLATFORMS:
            try:
                choice = operation.choose_on(platform, *call)
            except UnsupportedOperationError as refusal:
                rows.append(Row(name, platform, "-", "-", str(refusal)))
            else:
                rows.append(Row(name, platform, choice.implementation, choice.backend, choice.reason))
    return rows


def cpu_kernels() -> str:
    """Whether the operators in C++ are built, in a line; nothing is built for it."""
    return library.described()


def repeated_calls() -> str:
    """Whether repeated calls are found in C++, in a line; nothing is built for it."""
    return repeated.described()
