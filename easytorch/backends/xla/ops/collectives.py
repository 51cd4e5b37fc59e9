"""Collectives by replica: each device runs the program as one replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from easytorch.backends.shapeinference import infer
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType, ReduceOpType
from easytorch.backends.xla.emitter import Emitter, Value, pairs
from easytorch.backends.xla.narrow import widened
from easytorch.backends.xla.ops import Emit
from easytorch.backends.xla.ops.reduction import COMBINERS

Groups = tuple[tuple[int, ...], ...] | None


def _groups(e: Emitter, groups: Groups) -> tuple[str, int]:
    """The `replica_groups` attribute, and the size of a group."""
    found = (tuple(range(e.num_devices)),) if groups is None else groups
    longest = max(map(len, found))
    rows = [(*group, *(-1,) * (longest - len(group))) for group in found]
    return f"replica_groups = {pairs(rows)}", len(found[0])


def _reducing(op_type: OpType, name: str) -> Callable[..., Value]:
    def emit(e: Emitter, x: Value, reduction_type: ReduceOpType, replica_groups: Groups, **axis: int) -> Value:
        settings: dict[str, Any] = {"reduction_type": reduction_type, "replica_groups": replica_groups, **axis}
        (shape,) = infer(op_type, (x.shape,), settings, num_devices=e.num_devices)
        combiner = COMBINERS[reduction_type][0]
        region = e.region([Shape(x.dtype)] * 2, lambda a, b: [e.binary(combiner, a, b)])
        attributes = [_groups(e, replica_groups)[0], *(f"scatter_dimension = {a} : i64" for a in axis.values())]
        return e.op(name, (x,), shape, ", ".join(attributes), region)

    return widened(emit, least=4)


def _all_gather(e: Emitter, x: Value, axis: int, replica_groups: Groups) -> Value:
    groups, count = _groups(e, replica_groups)
    sizes = (*x.dimensions[:axis], x.dimensions[axis] * count, *x.dimensions[axis + 1 :])
    return e.op("all_gather", (x,), Shape(x.dtype, sizes), f"all_gather_dim = {axis} : i64, {groups}")


def _all_to_all(e: Emitter, x: Value, split_axis: int, concat_axis: int, replica_groups: Groups) -> Value:
    groups, count = _groups(e, replica_groups)
    sizes = list(x.dimensions)
    sizes[split_axis] //= count
    sizes[concat_axis] *= count
    attributes = (
        f"split_dimension = {split_axis} : i64, concat_dimension = {concat_axis} : i64, "
        f"split_count = {count} : i64, {groups}"
    )
    return e.op("all_to_all", (x,), Shape(x.dtype, tuple(sizes)), attributes)


def _collective_permute(e: Emitter, x: Value, source_target_pairs: tuple[tuple[int, ...], ...]) -> Value:
    return e.op("collective_permute", (x,), x.shape, f"source_target_pairs = {pairs(source_target_pairs)}")


EMITTERS: dict[OpType, Emit] = {
    OpType.ALL_REDUCE: _reducing(OpType.ALL_REDUCE, "all_reduce"),
    OpType.REDUCE_SCATTER: _reducing(OpType.REDUCE_SCATTER, "reduce_scatter"),
    OpType.ALL_GATHER: _all_gather,
    OpType.ALL_TO_ALL: _all_to_all,
    OpType.COLLECTIVE_PERMUTE: _collective_permute,
}
