"""Plans over names and shapes alone: the order of a table, ties of every kind, and what is kept beside."""

from __future__ import annotations

import pytest

from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.rules.head_transforms import stacked
from easytorch.bridge.rules.plan import cast_plan, plan_from_torch, plan_to_torch
from easytorch.bridge.rules.table import compile_rules

EMBEDDING = ("embed.weight", "embed/embedding", "identity")
HEAD = ("head.weight", "head/kernel", "linear")


def infos(*names, shape=(2, 2)):
    return {name: TensorInfo(name, shape, "float32", "x.safetensors") for name in names}


def moves(plan):
    return [(step.sources, tuple(info.name for info in step.targets)) for step in plan.steps]


def same(one, other):
    return True


def differ(one, other):
    return False


def test_layers_stand_by_number_and_choices_as_listed():
    """`h/10` after `h/9`, and q before k as the rule has them, whatever order the file has."""
    rules = (("h.{i}.{part:q|k|a}.weight", "h/{i}/{part}/kernel", "identity"), ("z.{name}.b", "z/{name}/b", "identity"))
    names = [f"h.{i}.{part}.weight" for i in (11, 2, 10, 1, 9, 0) for part in "akq"] + [
        "z.b.b",
        "z.a.b",
        "z.10.b",
        "z.9.b",
    ]
    plan = plan_from_torch(infos(*names), compile_rules(rules), tie=False, same=same)
    expected = [f"h/{i}/{part}/kernel" for i in (0, 1, 2, 9, 10, 11) for part in "qka"]
    assert [info.name for step in plan.steps for info in step.targets] == [
        *expected,
        *(f"z/{name}/b" for name in ("9", "10", "a", "b")),
    ]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("stood", [True, False])
def test_a_leaf_that_torch_may_leave_out(tie, alike, stood):
    """`tied_in_torch`: left out of torch only where the config ties it, the bits agree, and no file had it."""
    rules = (EMBEDDING, HEAD, ("head.weight", "embed/embedding", "tied_in_torch"))
    leaves = infos("embed/embedding", "head/kernel")
    plan = plan_to_torch(
        leaves, compile_rules(rules), tie=tie, same=same if alike else differ, tied=["head.weight"] if stood else []
    )
    left_out = tie and alike and not stood
    assert ("head.weight" in plan.targets) == (not left_out)
    assert plan.tied == ({"head.weight": "embed/embedding"} if left_out else {})


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("kind", "own_row"), [("tied", False), ("tied", True), ("tied_always", False)])
def test_repeats_are_written_again_where_torch_needs_them(tie, kind, own_row):
    rules = (EMBEDDING, *((HEAD,) if own_row else ()), ("head.weight", "embed/embedding", kind))
    table, leaves = compile_rules(rules), infos("embed/embedding")
    plan = plan_to_torch(leaves, table, tie=tie, same=differ)
    assert ("head.weight" in plan.targets) == (not tie and not own_row)
    assert "head.weight" in plan_to_torch(leaves, table, tie=tie, same=differ, tied=["head.weight"]).targets


def test_an_equal_repeat_is_left_out_and_another_is_not():
    table = compile_rules((EMBEDDING, HEAD, ("head.weight", "embed/embedding", "tied")))
    tensors = infos("embed.weight", "head.weight")
    plan = plan_from_torch(tensors, table, tie=True, same=same)
    assert moves(plan) == [(("embed.weight",), ("embed/embedding",))] and plan.tied == {
        "head.weight": "embed/embedding"
    }
    for tie in (True, False):
        plan = plan_from_torch(tensors, table, tie=tie, same=differ)
        assert [target for _, target in moves(plan)] == [("embed/embedding",), ("head/kernel",)]
        assert plan.tied == {} and len(plan.notes) == tie


def test_a_repeat_without_a_place_of_its_own():
    table = compile_rules(
        (EMBEDDING, ("head.weight", "embed/embedding", "tied"), ("last.weight", "embed/embedding", "tied"))
    )
    tensors = infos("embed.weight", "head.weight")
    with pytest.raises(CheckpointError, match=r"head\.weight.*differs from 'embed\.weight'.*one leaf for both"):
        plan_from_torch(tensors, table, tie=True, same=differ)
    alone = plan_from_torch(infos("head.weight"), table, tie=True, same=differ)
    assert moves(alone) == [(("head.weight",), ("embed/embedding",))]
    with pytest.raises(CheckpointError, match=r"last\.weight.*differs from 'head\.weight'"):
        plan_from_torch(infos("head.weight", "last.weight"), table, tie=True, same=differ)
    both = plan_from_torch(infos("head.weight", "last.weight"), table, tie=True, same=same)
    assert moves(both) == [(("head.weight",), ("embed/embedding",))] and set(both.tied) == {"last.weight"}


def test_a_head_alone_is_the_embedding_only_where_it_is_tied():
    table = compile_rules((EMBEDDING, HEAD, ("head.weight", "embed/embedding", "tied")))
    for tie, leaf in ((True, "embed/embedding"), (False, "head/kernel")):
        plan = plan_from_torch(infos("head.weight"), table, tie=tie, same=differ)
        assert moves(plan) == [(("head.weight",), (leaf,))]


def test_the_bias_that_a_layer_adds_is_the_leaf_and_the_heads_own_comes_back():
    table = compile_rules((("head.bias", "head/bias", "identity"), ("head.decoder.bias", "head/bias", "tied_always")))
    plan = plan_from_torch(infos("head.bias", "head.decoder.bias", shape=(2,)), table, tie=True, same=differ)
    assert moves(plan) == [(("head.decoder.bias",), ("head/bias",))] and plan.kept == {"head.bias": "head.bias"}
    back = plan_to_torch(infos("head/bias", shape=(2,)), table, tie=True, same=differ, kept=["head.bias"])
    assert moves(back) == [(("head/bias",), ("head.decoder.bias",))]


def test_an_unread_leaf():
    rules = (EMBEDDING, HEAD, ("head.weight", "head/kernel", "unread"), ("head.weight", "embed/embedding", "tied"))
    table, leaves = compile_rules(rules), infos("embed/embedding", "head/kernel")
    plan = plan_to_torch(leaves, table, tie=True, same=same)
    assert moves(plan) == [(("embed/embedding",), ("embed.weight",))] and plan.tied == {
        "head.weight": "embed/embedding"
    }
    with pytest.raises(CheckpointError, match=r"head/kernel.*differs from embed/embedding"):
        plan_to_torch(leaves, table, tie=True, same=differ)


def test_filled_repeats_and_buffers():
    rules = (EMBEDDING, HEAD, ("head.weight", "embed/embedding", "tied_in_torch"), ("ids", None, "buffer"))
    plan = plan_from_torch(
        infos("embed.weight", "ids"), compile_rules(rules), tie=True, same=same, fill=["head.weight", "embed.weight"]
    )
    assert moves(plan) == [(("embed.weight",), ("embed/embedding",)), (("embed.weight",), ("head/kernel",))]
    assert plan.kept == {"ids": "ids"}


def test_casts_are_of_floating_point_alone():
    tensors = infos("a") | {"n": TensorInfo("n", (2,), "int64", "x")}
    plan = cast_plan(tensors, "bfloat16")
    assert {info.name: info.dtype for info in plan.targets.values()} == {"a": "bfloat16", "n": "int64"}


def test_parts_of_one_tensor_are_alike():
    """Fused tensors have one dtype, and a stack has as many layers as the table says."""
    table = compile_rules(((("a.weight", "b.weight"), "both/kernel", stacked("linear", 2, 0)),))
    tensors = infos("a.weight") | {"b.weight": TensorInfo("b.weight", (2, 2), "bfloat16", "x")}
    with pytest.raises(CheckpointError, match=r"b\.weight.*is bfloat16, 'a\.weight' is float32.*give a dtype"):
        plan_from_torch(tensors, table, tie=False, same=same)
    with pytest.raises(CheckpointError, match=r"\(3, 2, 2\) is no stack of 2"):
        plan_to_torch(infos("both/kernel", shape=(3, 2, 2)), table, tie=False, same=same)
    with pytest.raises(CheckpointError, match=r"b\.weight.*is missing"):
        plan_from_torch(infos("a.weight"), table, tie=False, same=same)


@pytest.mark.parametrize("fill", [(), ("head.weight",)], ids=["given", "filled"])
def test_a_tie_to_a_leaf_that_no_row_makes_is_refused(fill):
    table = compile_rules((EMBEDDING, ("head.weight", "embedding/embed", "tied_in_torch")))
    given = infos("embed.weight") if fill else infos("embed.weight", "head.weight")
    with pytest.raises(CheckpointError, match=r"head\.weight.*'embedding/embed', which no row of the table makes"):
        plan_from_torch(given, table, tie=True, same=same, fill=fill)
