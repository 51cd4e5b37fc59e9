"""`diff`: the tensors in which two checkpoints differ, across formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import numpy as np

from easytorch.bridge.checkpoint import Checkpoint, open_checkpoint
from easytorch.bridge.core.callable_module import call_as
from easytorch.bridge.core.compare import identical
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.core.unsupported import note_on_adapter
from easytorch.bridge.formats.steps import step_folder
from easytorch.bridge.jobs.locations import local_source
from easytorch.bridge.rules.table import Rules
from easytorch.bridge.rules.user_file import given_rules
from easytorch.bridge.schemes.registry import TORCH

# Tensors are compared in pieces, so that memory does not grow with their size.
_PIECE = 1 << 20


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs. `max_abs` and `max_rel` (relative to the first) are None where shapes differ.

    They are 0 where only the sign of a zero, the bits of a NaN or the dtype differ.
    """

    name: str
    first: TensorInfo
    second: TensorInfo
    max_abs: float | None
    max_rel: float | None


@dataclass(frozen=True)
class Difference:
    """Two checkpoints compared under the names of `scheme`: tensors only one has, and those that differ."""

    first: str
    second: str
    scheme: str
    compared: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differing: tuple[TensorDifference, ...]
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether the checkpoints hold the same tensors, bit for bit."""
        return not (self.only_first or self.only_second or self.differing)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "same": self.same}


def diff(
    first: str | PathLike[str],
    second: str | PathLike[str],
    *,
    config: str | PathLike[str] | None = None,
    tolerance: float = 0.0,
    rules: Rules | str | PathLike[str] | None = None,
) -> Difference:
    """Compares two checkpoints in any formats, under torch's names where their schemes differ.

    A tensor differs when its shape does, when its dtype does, or when some value is further than `tolerance` from the
    first's (0: when some bit differs). `config` is the config.json of those that have none. `rules` are the table of a
    model of your own, as for `convert`: by it a tree is compared with torch's names, or two trees are.
    """
    table = given_rules(rules)
    if not tolerance >= 0.0:
        raise ValueError(f"tolerance is {tolerance}; give a number from 0 on")
    with (
        local_source(first) as here,
        local_source(second) as there,
        open_checkpoint(here, config=config) as one,
        open_checkpoint(there, config=config) as other,
    ):
        scheme = one.scheme if one.scheme == other.scheme and table is None else TORCH
        if table is not None and one.scheme == other.scheme == TORCH:
            raise ValueError("rules say how torch's names and a tree's are exchanged, and both checkpoints are torch's")
        left, right = (_reader(checkpoint, scheme, table) for checkpoint in (one, other))
        shared = [name for name in left.tensors if name in right.tensors]
        found = (_compare(left, right, name, tolerance) for name in shared)
        return Difference(
            first=str(first),
            second=str(second),
            scheme=scheme,
            compared=len(shared),
            only_first=tuple(name for name in left.tensors if name not in right.tensors),
            only_second=tuple(name for name in right.tensors if name not in left.tensors),
            differing=tuple(difference for difference in found if difference is not None),
            notes=tuple(
                note
                for path, checkpoint in ((here, one), (there, other))
                for note in note_on_adapter(path, step_folder(path, checkpoint.reader.files[0]))
            ),
        )


def _reader(checkpoint: Checkpoint, scheme: str, rules: Rules | None) -> Reader:
    if rules is None or checkpoint.scheme == scheme:
        return checkpoint.in_scheme(scheme).reader
    return checkpoint.by_rules(rules, scheme).reader


def _compare(left: Reader, right: Reader, name: str, tolerance: float) -> TensorDifference | None:
    one, other = left.tensors[name], right.tensors[name]
    if one.shape != other.shape:
        return TensorDifference(name, one, other, None, None)
    first, second = left.read(name), right.read(name)
    if identical(first, second):
        return None
    absolute, relative = _distance(first, second)
    if one.dtype == other.dtype and tolerance > 0.0 and absolute <= tolerance:
        return None
    return TensorDifference(name, one, other, absolute, relative)


def _distance(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """The largest absolute and relative difference; NaN in one place of only one of them counts as infinite."""
    absolute = relative = 0.0
    for one, other in _pieces(first, second, _exact(first.dtype, second.dtype)):
        gap = _gaps(one, other)
        if gap.size:
            absolute = max(absolute, float(gap.max()))
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(gap == 0, 0.0, gap / np.abs(one.astype(np.result_type(one, np.float64))))
            # An infinity or NaN in the first has no relative difference.
            ratio[np.isnan(ratio)] = np.inf
            relative = max(relative, float(ratio.max()))
    return absolute, relative


def _exact(first: np.dtype, second: np.dtype) -> np.dtype:
    """The dtype in which the elements are subtracted: float64 cannot distinguish 2**53 from 2**53 + 1."""
    if {first.kind, second.kind} <= {"i", "u"} and (common := np.result_type(first, second)).kind != "f":
        return np.dtype(f"{common.kind}8")
    return np.dtype("complex128" if "complex" in first.name or "complex" in second.name else "float64")


def _gaps(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The absolute differences: 0 where both are NaN, infinite where only one is."""
    gap: np.ndarray
    if one.dtype.kind == "c":
        gap = np.hypot(_gaps(one.real, other.real), _gaps(one.imag, other.imag))
        return gap
    if one.dtype.kind in "iu":
        # The difference of two int64 may overflow: it wraps around, and is right as an unsigned integer.
        gap = np.maximum(one, other) - np.minimum(one, other)
        return gap.view(np.uint64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(one - other)
    gap[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    gap[np.isnan(gap)] = np.inf
    return gap


def _pieces(first: np.ndarray, second: np.ndarray, dtype: np.dtype) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if first.size <= _PIECE or first.ndim == 0:
        yield np.atleast_1d(first.astype(dtype)), np.atleast_1d(second.astype(dtype))
        return
    rows = _PIECE * len(first) // first.size
    if rows == 0:
        for one, other in zip(first, second, strict=True):
            yield from _pieces(one, other, dtype)
    else:
        for start in range(0, len(first), rows):
            yield from _pieces(first[start : start + rows], second[start : start + rows], dtype)


call_as(diff)
