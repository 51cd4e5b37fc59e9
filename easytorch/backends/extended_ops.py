"""Operations beyond GoMLX's page: control flow with closures, sorting, collectives, and composite operations.

A closure is a Python function `(builder, *ops) -> op or tuple of ops` over a builder of its own; it may use operations
of the builder around it, which become further inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from easytorch.backends.shapes import Shape, ints
from easytorch.backends.types import OpType, ReduceOpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Graph, Op

Closure = Callable[..., Any]


class ExtendedOps:
    """Replica groups are lists of device numbers; None is one group of all."""

    def _add_one(self, op_type: OpType, *operands: Any, **attributes: Any) -> Op:
        raise NotImplementedError

    def _add(self, op_type: OpType, *operands: Any, **attributes: Any) -> tuple[Op, ...]:
        raise NotImplementedError

    def _closure(self, function: Closure, shapes: Sequence[Shape], name: str) -> Graph:
        raise NotImplementedError

    def _shapes(self, operands: Sequence[Op]) -> list[Shape]:
        raise NotImplementedError

    def call(self, function: Closure, *inputs: Op) -> tuple[Op, ...]:
        """What the closure gives for `inputs`, as a function of its own."""
        graph = self._closure(function, self._shapes(inputs), "call")
        return self._add(OpType.CALL, *inputs, *graph.captures, function=graph)

    def while_loop(self, cond: Closure, body: Closure, *initial_state: Op) -> tuple[Op, ...]:
        """The state after applying `body` as long as `cond` gives a true scalar for it."""
        shapes = self._shapes(initial_state)
        test, step = self._closure(cond, shapes, "cond"), self._closure(body, shapes, "body")
        return self._add(OpType.WHILE_LOOP, *initial_state, *test.captures, *step.captures, cond=test, body=step)

    def cond(self, pred: Op, true_branch: Closure, false_branch: Closure) -> tuple[Op, ...]:
        """What one of two closures without arguments gives: the first if the bool scalar holds."""
        first, second = self._closure(true_branch, (), "true_branch"), self._closure(false_branch, (), "false_branch")
        return self._add(OpType.COND, pred, *first.captures, *second.captures, true_branch=first, false_branch=second)

    def sort(self, comparator: Closure, axis: int, is_stable: bool, *inputs: Op) -> tuple[Op, ...]:
        """`inputs`, of one size, sorted together along `axis`.

        comparator: given two scalars of each input, (first0, second0, first1, second1, ...), whether the first comes
        before the second.
        """
        scalars = [Shape(shape.dtype) for shape in self._shapes(inputs) for _ in range(2)]
        graph = self._closure(comparator, scalars, "comparator")
        return self._add(OpType.SORT, *inputs, *graph.captures, comparator=graph, axis=axis, is_stable=bool(is_stable))

    def all_reduce(
        self, x: Op, reduction_type: ReduceOpType, replica_groups: Sequence[Sequence[int]] | None = None
    ) -> Op:
        """x put together over the devices of each group; every one of them gets it."""
        return self._add_one(
            OpType.ALL_REDUCE, x, reduction_type=ReduceOpType(reduction_type), replica_groups=_groups(replica_groups)
        )

    def all_gather(self, x: Op, axis: int, replica_groups: Sequence[Sequence[int]] | None = None) -> Op:
        """The x of all devices of a group, one after the other along `axis`."""
        return self._add_one(OpType.ALL_GATHER, x, axis=axis, replica_groups=_groups(replica_groups))

    def reduce_scatter(
        self, x: Op, reduction_type: ReduceOpType, axis: int, replica_groups: Sequence[Sequence[int]] | None = None
    ) -> Op:
        """`all_reduce`, of which each device keeps its part along `axis`."""
        return self._add_one(
            OpType.REDUCE_SCATTER,
            x,
            reduction_type=ReduceOpType(reduction_type),
            axis=axis,
            replica_groups=_groups(replica_groups),
        )

    def all_to_all(
        self, x: Op, split_axis: int, concat_axis: int, replica_groups: Sequence[Sequence[int]] | None = None
    ) -> Op:
        """x cut along `split_axis`, a part for each device of the group, and the parts got put together along
        `concat_axis`."""
        return self._add_one(
            OpType.ALL_TO_ALL,
            x,
            split_axis=split_axis,
            concat_axis=concat_axis,
            replica_groups=_groups(replica_groups),
        )

    def collective_permute(self, x: Op, source_target_pairs: Sequence[Sequence[int]]) -> Op:
        """The x of the device that sends to this one; zeros where none does."""
        pairs = tuple(ints((tuple(pair),)) for pair in source_target_pairs)
        return self._add_one(OpType.COLLECTIVE_PERMUTE, x, source_target_pairs=pairs)

    def softmax(self, x: Op, axis: int) -> Op:
        """exp(x) divided by its sum along `axis`, computed without overflow."""
        return self._add_one(OpType.SOFTMAX, x, axis=axis)

    def layer_norm(self, x: Op, scale: Op, offset: Op, axes: Sequence[int], epsilon: float) -> Op:
        """x minus its mean, divided by its deviation over `axes`, times scale plus offset, which have those axes."""
        return self._add_one(OpType.LAYER_NORM, x, scale, offset, axes=ints((tuple(axes),)), epsilon=float(epsilon))

    def gelu(self, x: Op, approximate: bool = False) -> Op:
        """x times the normal distribution function of x, exactly by erf or approximately by tanh."""
        return self._add_one(OpType.GELU, x, approximate=bool(approximate))

    def scaled_dot_product_attention(
        self,
        query: Op,
        key: Op,
        value: Op,
        mask: Op | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Op:
        """softmax(query key^T * scale) value, as torch.nn.functional's of that name.

        query (B, H, T, D), key (B, K, S, D), value (B, K, S, Dv), H a multiple of K, scale D**-0.5 if None. mask: bool,
        True attends, or of query's dtype, added; broadcastable to (B, H, T, S). is_causal is aligned to the first
        query and key. A row with nothing to attend gives zeros.
        """
        operands = (query, key, value) if mask is None else (query, key, value, mask)
        return self._add_one(
            OpType.SCALED_DOT_PRODUCT_ATTENTION,
            *operands,
            is_causal=bool(is_causal),
            scale=None if scale is None else float(scale),
        )


def _groups(groups: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    return None if groups is None else tuple(ints((tuple(group),)) for group in groups)
