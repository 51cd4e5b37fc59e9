"""Collectives: each device contributes its operand, and groups of devices exchange them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from easytorch.backends.arguments import integer, integers, member, sequence
from easytorch.backends.builder_ops.recorder import Recorder
from easytorch.backends.types import OpType, ReduceOpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


class CollectivesOps(Recorder):
    """Replica groups are lists of device numbers, of one size but for `all_reduce`; None is one group of all."""

    def all_reduce(
        self, x: Op, reduction_type: ReduceOpType, replica_groups: Sequence[Sequence[int]] | None = None
    ) -> Op:
        """x reduced over the devices of each group; each of them has the result."""
        return self._add_one(
            OpType.ALL_REDUCE,
            x,
            reduction_type=member(ReduceOpType, reduction_type, "reduction_type"),
            replica_groups=_groups(replica_groups),
        )

    def all_gather(self, x: Op, axis: int, replica_groups: Sequence[Sequence[int]] | None = None) -> Op:
        """The x of all devices of a group, one after the other along `axis`."""
        return self._add_one(OpType.ALL_GATHER, x, axis=integer(axis, "axis"), replica_groups=_groups(replica_groups))

    def reduce_scatter(
        self, x: Op, reduction_type: ReduceOpType, axis: int, replica_groups: Sequence[Sequence[int]] | None = None
    ) -> Op:
        """`all_reduce`, of which each device keeps its part along `axis`."""
        return self._add_one(
            OpType.REDUCE_SCATTER,
            x,
            reduction_type=member(ReduceOpType, reduction_type, "reduction_type"),
            axis=integer(axis, "axis"),
            replica_groups=_groups(replica_groups),
        )

    def all_to_all(
        self, x: Op, split_axis: int, concat_axis: int, replica_groups: Sequence[Sequence[int]] | None = None
    ) -> Op:
        """x split along `split_axis`, a part for each device of the group; the parts received are concatenated along
        `concat_axis`."""
        return self._add_one(
            OpType.ALL_TO_ALL,
            x,
            split_axis=integer(split_axis, "split_axis"),
            concat_axis=integer(concat_axis, "concat_axis"),
            replica_groups=_groups(replica_groups),
        )

    def collective_permute(self, x: Op, source_target_pairs: Sequence[Sequence[int]]) -> Op:
        """The x of the device that sends to this one; zeros where none does."""
        pairs = _rows(source_target_pairs, "source_target_pairs")
        return self._add_one(OpType.COLLECTIVE_PERMUTE, x, source_target_pairs=pairs)


def _groups(groups: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    return None if groups is None else _rows(groups, "replica_groups")


def _rows(rows: Sequence[Sequence[int]], what: str) -> tuple[tuple[int, ...], ...]:
    return tuple(integers(row, f"the rows of {what}") for row in sequence(rows, what))
