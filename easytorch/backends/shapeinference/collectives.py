"""Collectives: what devices exchange."""

from __future__ import annotations

from easytorch.backends.errors import BackendError
from easytorch.backends.shapeinference.reduction import REDUCIBLE, reducible
from easytorch.backends.shapeinference.rule import Rule, require_axis, takes
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType, ReduceOpType

Groups = tuple[tuple[int, ...], ...] | None


def _require_groups(groups: Groups, num_devices: int) -> None:
    """`BackendError` unless every device is in exactly one group."""
    if groups is not None and sorted(device for group in groups for device in group) != list(range(num_devices)):
        raise BackendError(f"replica_groups {groups} must contain each of the {num_devices} devices exactly once")


def group_size(groups: Groups, num_devices: int) -> int:
    """How many devices a group has; `BackendError` unless every device is in exactly one group, all of one size."""
    if groups is None:
        return num_devices
    _require_groups(groups, num_devices)
    if len({len(group) for group in groups}) > 1:
        raise BackendError(f"replica_groups {groups} must all have the same size")
    return len(groups[0])


@takes(REDUCIBLE, "integers, floats, complex numbers and bool")
def _all_reduce(x: Shape, reduction_type: ReduceOpType, replica_groups: Groups, num_devices: int) -> Shape:
    reducible(x, reduction_type)
    _require_groups(replica_groups, num_devices)
    return x


def _all_gather(x: Shape, axis: int, replica_groups: Groups, num_devices: int) -> Shape:
    require_axis(x, axis)
    return _sized(x, axis, x.dimensions[axis] * group_size(replica_groups, num_devices))


@takes(REDUCIBLE, "integers, floats, complex numbers and bool")
def _reduce_scatter(
    x: Shape, reduction_type: ReduceOpType, axis: int, replica_groups: Groups, num_devices: int
) -> Shape:
    reducible(x, reduction_type)
    require_axis(x, axis)
    return _sized(x, axis, _parts(x, axis, group_size(replica_groups, num_devices)))


def _all_to_all(x: Shape, split_axis: int, concat_axis: int, replica_groups: Groups, num_devices: int) -> Shape:
    require_axis(x, split_axis, "split_axis")
    require_axis(x, concat_axis, "concat_axis")
    count = group_size(replica_groups, num_devices)
    split = _sized(x, split_axis, _parts(x, split_axis, count))
    return _sized(split, concat_axis, split.dimensions[concat_axis] * count)


def _collective_permute(x: Shape, source_target_pairs: tuple[tuple[int, ...], ...], num_devices: int) -> Shape:
    for side, name in ((0, "sends"), (1, "receives")):
        devices = [pair[side] for pair in source_target_pairs if len(pair) == 2]
        if len(devices) != len(source_target_pairs) or len(set(devices)) != len(devices):
            raise BackendError(
                f"source_target_pairs {source_target_pairs} must be pairs in which no device {name} twice"
            )
        if any(not 0 <= device < num_devices for device in devices):
            raise BackendError(f"source_target_pairs {source_target_pairs} name devices outside 0..{num_devices - 1}")
    return x


def _parts(x: Shape, axis: int, count: int) -> int:
    if x.dimensions[axis] % count:
        raise BackendError(f"axis {axis} of {x} cannot be split into {count} equal parts")
    return x.dimensions[axis] // count


def _sized(x: Shape, axis: int, size: int) -> Shape:
    return Shape(x.dtype, (*x.dimensions[:axis], size, *x.dimensions[axis + 1 :]))


RULES: dict[OpType, Rule] = {
    OpType.ALL_REDUCE: _all_reduce,
    OpType.ALL_GATHER: _all_gather,
    OpType.REDUCE_SCATTER: _reduce_scatter,
    OpType.ALL_TO_ALL: _all_to_all,
    OpType.COLLECTIVE_PERMUTE: _collective_permute,
}
