"""Collectives: functions of the arrays of one group's devices, one result per device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from easytorch.backends.reference.ops.reduction import reduced
from easytorch.backends.types import OpType, ReduceOpType

Arrays = Sequence[np.ndarray]


def _all_reduce(values: Arrays, reduction_type: ReduceOpType) -> Arrays:
    return [reduced(np.stack(values), reduction_type, (0,))] * len(values)


def _all_gather(values: Arrays, axis: int) -> Arrays:
    return [np.concatenate(values, axis)] * len(values)


def _reduce_scatter(values: Arrays, reduction_type: ReduceOpType, axis: int) -> Arrays:
    return np.split(_all_reduce(values, reduction_type)[0], len(values), axis)


def _all_to_all(values: Arrays, split_axis: int, concat_axis: int) -> Arrays:
    parts = [np.split(value, len(values), split_axis) for value in values]
    return [np.concatenate(received, concat_axis) for received in zip(*parts, strict=True)]


def _collective_permute(values: Arrays, source_target_pairs: Sequence[tuple[int, int]]) -> Arrays:
    senders = {target: source for source, target in source_target_pairs}
    return [
        values[senders[device]] if device in senders else np.zeros_like(value) for device, value in enumerate(values)
    ]


COLLECTIVE: dict[OpType, Callable[..., Arrays]] = {
    OpType.ALL_REDUCE: _all_reduce,
    OpType.ALL_GATHER: _all_gather,
    OpType.REDUCE_SCATTER: _reduce_scatter,
    OpType.ALL_TO_ALL: _all_to_all,
    OpType.COLLECTIVE_PERMUTE: _collective_permute,
}
