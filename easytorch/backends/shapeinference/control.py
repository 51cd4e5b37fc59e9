"""Closures, sorting, random bits and collectives."""

from __future__ import annotations

from collections.abc import Sequence

from easytorch.backends.dtypes import FLOATS, SIGNED, UNSIGNED, DType
from easytorch.backends.errors import BackendError
from easytorch.backends.graph import Graph
from easytorch.backends.shapeinference.reduction import REDUCIBLE, reducible
from easytorch.backends.shapeinference.rule import Rule, require_axis, require_dtype, takes
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType, ReduceOpType

_TRUTH = (Shape(DType.BOOL),)


def _call(*inputs: Shape, function: Graph) -> tuple[Shape, ...]:
    _takes(function, inputs)
    return function.output_shapes


def _while(*inputs: Shape, cond: Graph, body: Graph) -> tuple[Shape, ...]:
    state = inputs[: len(inputs) - len(cond.captures) - len(body.captures)]
    if not state:
        raise BackendError("a loop needs at least one state operand")
    if cond.output_shapes != _TRUTH:
        raise BackendError(f"the condition returns {_listed(cond.output_shapes)}; it must return one bool scalar")
    if body.output_shapes != state:
        raise BackendError(
            f"the body returns {_listed(body.output_shapes)}; it must return the shapes of the state, {_listed(state)}"
        )
    return state


@takes((DType.BOOL,), "the condition must be a bool scalar")
def _cond(pred: Shape, *captures: Shape, true_branch: Graph, false_branch: Graph) -> tuple[Shape, ...]:
    if (pred,) != _TRUTH:
        raise BackendError("the condition must be a bool scalar")
    one, other = true_branch.output_shapes, false_branch.output_shapes
    if one != other:
        raise BackendError(f"the branches return {_listed(one)} and {_listed(other)}; they must return the same shapes")
    return one


def _sort(*inputs: Shape, comparator: Graph, axis: int, is_stable: bool) -> tuple[Shape, ...]:
    operands = inputs[: len(inputs) - len(comparator.captures)]
    if not operands or len({shape.dimensions for shape in operands}) > 1:
        raise BackendError("operands that are sorted together must have the same dimensions")
    require_axis(operands[0], axis)
    if comparator.output_shapes != _TRUTH:
        raise BackendError(
            f"the comparator returns {_listed(comparator.output_shapes)}; it must return one bool scalar"
        )
    return operands


def _takes(graph: Graph, inputs: Sequence[Shape]) -> None:
    if tuple(inputs) != graph.parameter_shapes:
        raise BackendError(f"the closure takes {_listed(graph.parameter_shapes)}, and is given {_listed(inputs)}")


def _listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, shapes)) or "nothing"


@takes((DType.UINT64,), "the state of Philox is uint64[3]")
def _rng(state: Shape, shape: Shape) -> tuple[Shape, Shape]:
    wanted = Shape(DType.UINT64, (3,))
    if state != wanted:
        raise BackendError(f"the state of Philox is {wanted}: a key and a counter of two words")
    require_dtype(shape, (*UNSIGNED, *SIGNED, *FLOATS), "random bits are integers, or floats of their size")
    return state, shape


@takes((DType.UINT64,), "the state of ThreeFry is uint64[2]")
def _three_fry(state: Shape, shape: Shape) -> tuple[Shape, Shape]:
    wanted = Shape(DType.UINT64, (2,))
    if state != wanted:
        raise BackendError(f"the state of ThreeFry is {wanted}: a key and a counter")
    require_dtype(shape, (*UNSIGNED, *SIGNED, *FLOATS), "random bits are integers, or floats of their size")
    return state, shape


def halves(shape: Shape) -> tuple[tuple[int, ...], int]:
    """The shape of each of the two words that a ThreeFry step returns, and the axis along which they alternate."""
    sizes = shape.dimensions or (1,)
    axis = next((axis for axis, size in enumerate(sizes) if size % 2 == 0), sizes.index(max(sizes)))
    return (*sizes[:axis], -(-sizes[axis] // 2), *sizes[axis + 1 :]), axis


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
    OpType.CALL: _call,
    OpType.WHILE_LOOP: _while,
    OpType.COND: _cond,
    OpType.SORT: _sort,
    OpType.RNG_BIT_GENERATOR: _rng,
    OpType.RNG_BIT_GENERATOR_THREE_FRY: _three_fry,
    OpType.ALL_REDUCE: _all_reduce,
    OpType.ALL_GATHER: _all_gather,
    OpType.REDUCE_SCATTER: _reduce_scatter,
    OpType.ALL_TO_ALL: _all_to_all,
    OpType.COLLECTIVE_PERMUTE: _collective_permute,
}
COLLECTIVES = frozenset(
    {
        *(OpType.ALL_REDUCE, OpType.ALL_GATHER, OpType.REDUCE_SCATTER, OpType.ALL_TO_ALL),
        OpType.COLLECTIVE_PERMUTE,
    }
)
