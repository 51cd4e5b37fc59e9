"""Layouts with numbers in them, and rows whose torch side is the one that fuses."""

import numpy as np
import pytest

from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.rules.computed_transforms import unfolded
from easytorch.bridge.rules.head_transforms import heads_bias, heads_in, heads_out, stacked, with_batch
from easytorch.bridge.rules.plan import plan_from_torch, plan_to_torch
from easytorch.bridge.rules.table import compile_rules

RNG = np.random.default_rng(0)
# Three projections that torch keeps in one matrix.
CUT = (("in_proj", ("query", "key", "value"), stacked("linear", 3, 0)), ("bias", "bias", "identity"))


def _infos(arrays):
    return {name: TensorInfo(name, array.shape, array.dtype.name) for name, array in arrays.items()}


def _run(plan, arrays):
    return {
        info.name: array
        for step in plan.steps
        for info, array in zip(step.targets, step.run([arrays[name] for name in step.sources]), strict=True)
    }


@pytest.mark.parametrize(
    ("transform", "shapes", "leaf"),
    [
        (heads_out(3), [(12, 10)], (10, 3, 4)),
        (heads_in(3), [(10, 12)], (3, 4, 10)),
        (heads_bias(3), [(12,)], (3, 4)),
        (with_batch, [(5, 7)], (1, 5, 7)),
        (stacked("linear", 2, 0), [(4, 6)] * 2, (2, 6, 4)),
        (stacked(heads_out(3), 2, 1), [(12, 10)] * 2, (10, 2, 3, 4)),
        (stacked("identity", 4, 0), [(7,)] * 4, (4, 7)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_there_and_back(transform, shapes, leaf):
    arrays = [RNG.standard_normal(shape) for shape in shapes]
    made = transform.to_flax(arrays)
    assert made.shape == leaf == tuple(transform.flax_shape(shapes))
    assert [tuple(shape) for shape in transform.torch_shapes(leaf)] == shapes
    for one, other in zip(transform.to_torch(made), arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_head_is_a_block_of_the_matrix():
    """Row h d + i of torch's matrix is dimension i of head h."""
    matrix = RNG.standard_normal((12, 10))
    np.testing.assert_array_equal(heads_out(3).to_flax([matrix])[:, 1, 2], matrix[1 * 4 + 2])


def test_a_torch_tensor_of_several_leaves():
    leaves = {name: RNG.standard_normal((5, 4)) for name in ("key", "query", "value")} | {"bias": np.ones(3)}
    table = compile_rules(CUT)
    never = {"tie": False, "same": lambda one, other: False}
    torch = _run(plan_to_torch(_infos(leaves), table, **never), leaves)
    np.testing.assert_array_equal(torch["in_proj"], np.stack([leaves[name].T for name in ("query", "key", "value")]))
    back = _run(plan_from_torch(_infos(torch), table, **never), torch)
    assert set(back) == set(leaves)
    for name, array in leaves.items():
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda leaves: leaves.pop("key"), "'key'.*is missing"),
        (lambda leaves: leaves.update(key=leaves["key"].astype("float32")), "is float32, 'query' is float64"),
        (lambda leaves: leaves.update(key=leaves["key"][:, :3]), "and must have one"),
    ],
)
def test_leaves_that_make_no_tensor(change, match):
    leaves = {name: np.ones((5, 4)) for name in ("query", "key", "value")}
    change(leaves)
    with pytest.raises(CheckpointError, match=match):
        plan_to_torch(_infos(leaves), compile_rules(CUT), tie=False, same=lambda one, other: False)


def test_heads_that_do_not_divide():
    with pytest.raises(CheckpointError, match="not a multiple of its 3 heads"):
        heads_out(3).flax_shape([(10, 4)])


@pytest.mark.parametrize("shape", [(3, 2, 4), (6, 4), (1, 6, 4), (2, 2, 4)])
def test_a_stack_of_other_sizes_is_refused(shape):
    """Of as many elements too: they would be those of other layers and experts."""
    transform = unfolded(stacked("identity", 6, 0), (2, 3))
    assert len(transform.to_torch(np.zeros((2, 3, 4)))) == 6
    for refuses in (lambda: transform.to_torch(np.zeros(shape)), lambda: transform.torch_shapes(shape)):
        with pytest.raises(CheckpointError, match="is no stack of 2 times 3"):
            refuses()
