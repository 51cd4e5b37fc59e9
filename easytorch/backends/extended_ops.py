"""Operations beyond GoMLX's page: control flow with closures, sorting, collectives, and composite operations.

A closure is a Python function `(builder, *ops) -> op or tuple of ops` over a builder of its own; it may use operations
of the builder around it, which become further inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from easytorch.backends.arguments import integer, integers, member, pairs, real, sequence, truth
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType, ReduceOpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Graph, Op

Closure = Callable[..., Any]


class ExtendedOps:
    """Replica groups are lists of device numbers, of one size but for `all_reduce`; None is one group of all."""

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
        return self._add(
            OpType.SORT,
            *inputs,
            *graph.captures,
            comparator=graph,
            axis=integer(axis, "axis"),
            is_stable=truth(is_stable, "is_stable"),
        )

    def triangular_solve(
        self, a: Op, b: Op, left_side: bool, lower: bool, unit_diagonal: bool = False, adjoint: bool = False
    ) -> Op:
        """x with a x = b, or x a = b if not `left_side`, of matrices in the last two axes, batch axes before them.

        a (..., n, n): only its lower or upper triangle is read, and not its diagonal if that is all ones. adjoint: of
        its conjugate transpose.
        """
        return self._add_one(
            OpType.TRIANGULAR_SOLVE,
            a,
            b,
            left_side=truth(left_side, "left_side"),
            lower=truth(lower, "lower"),
            unit_diagonal=truth(unit_diagonal, "unit_diagonal"),
            adjoint=truth(adjoint, "adjoint"),
        )

    def select_and_scatter(
        self,
        operand: Op,
        source: Op,
        init_value: Op,
        select: Closure,
        scatter: Closure,
        window_dimensions: Sequence[int],
        window_strides: Sequence[int] | None = None,
        paddings: Sequence[Sequence[int]] | None = None,
    ) -> Op:
        """Each element of `source` put, by `scatter(so far, element)`, at the place its window over `operand` selects.

        What stands there first is the scalar `init_value`. A window's first element is selected, then each for which
        `select(selected, element)` is false; padding never. Both closures are operations on elements of two scalars,
        and capture nothing. In which order several go to one place is not defined.
        """
        shape = Shape(self._shapes([operand])[0].dtype)
        window = integers(window_dimensions, "window_dimensions")
        return self._add_one(
            OpType.SELECT_AND_SCATTER,
            operand,
            source,
            init_value,
            select=self._closure(select, (shape, shape), "select"),
            scatter=self._closure(scatter, (shape, shape), "scatter"),
            window_dimensions=window,
            window_strides=window if window_strides is None else integers(window_strides, "window_strides"),
            paddings=((0, 0),) * len(window) if paddings is None else pairs(paddings, "paddings"),
        )

    def all_reduce(
        self, x: Op, reduction_type: ReduceOpType, replica_groups: Sequence[Sequence[int]] | None = None
    ) -> Op:
        """x put together over the devices of each group; every one of them gets it."""
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
        """x cut along `split_axis`, a part for each device of the group, and the parts got put together along
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

    def softmax(self, x: Op, axis: int) -> Op:
        """exp(x) divided by its sum along `axis`, computed without overflow."""
        return self._add_one(OpType.SOFTMAX, x, axis=integer(axis, "axis"))

    def layer_norm(self, x: Op, scale: Op, offset: Op, axes: Sequence[int], epsilon: float) -> Op:
        """x minus its mean, divided by its deviation over `axes`, times scale plus offset, which have those axes."""
        return self._add_one(
            OpType.LAYER_NORM, x, scale, offset, axes=integers(axes, "axes"), epsilon=real(epsilon, "epsilon")
        )

    def gelu(self, x: Op, approximate: bool = False) -> Op:
        """x times the normal distribution function of x, exactly by erf or approximately by tanh."""
        return self._add_one(OpType.GELU, x, approximate=truth(approximate, "approximate"))

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
            is_causal=truth(is_causal, "is_causal"),
            scale=None if scale is None else real(scale, "scale"),
        )


def _groups(groups: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    return None if groups is None else _rows(groups, "replica_groups")


def _rows(rows: Sequence[Sequence[int]], what: str) -> tuple[tuple[int, ...], ...]:
    return tuple(integers(row, f"the rows of {what}") for row in sequence(rows, what))
