"""Meshes by name and partition specs, without processes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import easytorch
from easytorch.distributed import (
    declared_sharding,
    from_placements,
    parse_axes,
    partition_specs,
    to_jax,
    to_placements,
    to_xla,
)
from easytorch.distributed.rules import specs_by_rules
from easytorch.distributed.specs import check_spec, uneven_dimension
from tests.models.families import FAMILIES

MESH = SimpleNamespace(mesh_dim_names=("dp", "fsdp", "tp"), shape=(2, 3, 4), ndim=3, mesh=torch.empty(2, 3, 4))


def model_of(family: str, **settings) -> nn.Module:
    with torch.device("meta"):
        return easytorch.AutoModelForCausalLM.from_config(FAMILIES[family].config(vocab_size=96, **settings))


def test_axes_are_read_in_the_order_of_a_mesh() -> None:
    assert list(parse_axes("tp=2, fsdp=-1", 8).items()) == [("fsdp", 4), ("tp", 2)]
    assert list(parse_axes({"sp": 2, "ep": 1, "dp": 3}, 6).items()) == [("dp", 3), ("ep", 1), ("sp", 2)]
    assert parse_axes("dp=-1", 1) == {"dp": 1}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("tp=3", "the mesh tp=3 needs 3 devices, and there are 8"),
        ("tp=2", "the mesh tp=2 needs 2 devices, and there are 8"),
        ("dp=-1,tp=3", "needs a multiple of 3 devices, and there are 8"),
        ("dp=-1,tp=-1", "only one axis can be -1, the remaining devices, not dp and tp"),
        ("data=8", "no axis 'data'; the axes are dp, fsdp, pp, ep, sp, tp"),
        ("tp", "'tp' is not an axis and its size, as in 'tp=2'"),
        ("tp=two", "'tp=two' is not an axis"),
        ("tp=2,tp=4", "the axis tp is given twice"),
        ("tp=0,dp=8", "the axis tp has 0 devices"),
        ("tp=-2,dp=8", "the axis tp has -2 devices"),
        ("", "a mesh needs axes"),
        ({"tp": True}, "the axis tp has True devices"),
    ],
)
def test_axes_that_make_no_mesh_are_refused(axes, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse_axes(axes, 8)


def test_one_spec_in_the_notation_of_each_engine() -> None:
    from jax.sharding import PartitionSpec

    spec = ("tp", None, ("dp", "fsdp"))
    assert to_placements(spec, MESH) == (Shard(2), Shard(2), Shard(0))
    assert to_jax(spec) == PartitionSpec("tp", None, ("dp", "fsdp"))
    assert to_xla(spec, MESH.mesh_dim_names) == (2, None, (0, 1))
    assert to_xla(("ep", ("tp", "sp")), MESH.mesh_dim_names) == (None, 2), "an axis that the mesh lacks is one device"
    assert to_placements(("sp", "tp"), MESH) == (Replicate(), Replicate(), Shard(1))


def test_placements_and_specs_go_both_ways() -> None:
    names = (None, "dp", "fsdp", "tp", ("dp", "fsdp"), ("fsdp", "tp"), ("tp", "fsdp"), ("tp", "dp"))
    for first, second in itertools.product(names, names):
        used = [name for axes in (first, second) for name in ((axes,) if isinstance(axes, str) else axes or ())]
        if len(used) == len(set(used)):
            assert from_placements(to_placements((first, second), MESH), MESH, 2) == (first, second)


def test_jax_and_dtensor_cut_the_same_shards() -> None:
    """The shape of a device's shard, by jax's own arithmetic and by DTensor's."""
    from jax.sharding import AbstractMesh, NamedSharding
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    mesh = AbstractMesh(MESH.shape, MESH.mesh_dim_names)
    for spec in ((("dp", "fsdp"), "tp"), ("tp", "fsdp"), (None, ("fsdp", "tp")), (("dp", "fsdp", "tp"), None)):
        shape = (24, 48)
        placements = to_placements(spec, MESH)
        local, _ = _compute_local_shape_and_global_offset(shape, MESH.shape, [0, 0, 0], placements)
        assert tuple(local) == NamedSharding(mesh, to_jax(spec)).shard_shape(shape), spec


def test_what_is_no_spec_is_refused() -> None:
    assert check_spec(None, 2, "w") == (None, None) and check_spec(["tp"], 2, "w") == ("tp", None)
    assert check_spec(("tp", None, None), 1, "w") == ("tp",)
    assert check_spec((("tp", "fsdp"), ("dp",), ()), 3, "w") == (("tp", "fsdp"), "dp", None)
    for spec, error, message in (
        ("tp", TypeError, "w: a partition spec is a tuple"),
        ((1,), TypeError, "1 in"),
        ((("tp", 2),), TypeError, "is not an axis name"),
        ((None, None, "tp"), ValueError, r"w has 2 dimension\(s\), and the spec .* has 3"),
        (("tp", "tp"), ValueError, "names tp twice"),
    ):
        with pytest.raises(error, match=message):
            check_spec(spec, 2, "w")


def test_what_does_not_divide_is_named() -> None:
    sizes = {"fsdp": 3, "tp": 4}
    assert uneven_dimension((12, 7), (("fsdp", "tp"), None), sizes) is None
    assert uneven_dimension((7, 7), ("dp", None), sizes) is None
    words = uneven_dimension((24, 25), (None, ("fsdp", "tp")), sizes)
    assert words == (
        "dimension 1 of (24, 25), 25, does not divide over the 12 devices of fsdp=3 x tp=4; 24 or 36 would"
    )
    assert "4 would" in str(uneven_dimension((3,), ("tp",), sizes))


def test_the_plans_of_a_model_are_its_declaration() -> None:
    declared = declared_sharding(model_of("qwen3_moe"))
    layer = "model.layers.1."
    expected = {
        "model.embed_tokens.weight": ("tp", None), "lm_head.weight": ("tp", None), "model.norm.weight": (None,),
        layer + "self_attn.q_proj.weight": ("tp", None), layer + "self_attn.o_proj.weight": (None, "tp"),
        layer + "self_attn.q_norm.weight": (None,), layer + "mlp.gate.weight": (None, None),
        layer + "mlp.experts.gate_up_proj": ("ep", "tp", None), layer + "mlp.experts.down_proj": ("ep", None, "tp"),
    }  # fmt: skip
    assert {name: declared[name].spec for name in expected} == expected
    assert {name for name, one in declared.items() if one.parts == 2} == {
        f"model.layers.{index}.mlp.experts.gate_up_proj" for index in range(2)
    }
    biases = declared_sharding(model_of("starcoder2"))
    attention = "model.layers.0.self_attn."
    # each rank has a part of the rows' sums, and the bias is added once
    assert [biases[f"{attention}{name}_proj.bias"].spec for name in "qo"] == [("tp",), (None,)]
    assert {one.spec for one in declared_sharding(model_of("gpt2")).values()} <= {(None,), (None, None)}


def test_rules_go_over_the_declaration_and_a_mesh_cuts_it() -> None:
    model = model_of("llama", tie_word_embeddings=False)
    rules = {"q_proj": (None, "tp"), "layers/0/.*norm": ("fsdp",), "o_proj": (None, "fsdp")}
    specs = partition_specs(model, rules)
    assert specs["model.layers.1.self_attn.q_proj.weight"] == (None, "tp")
    assert specs["model.layers.1.self_attn.k_proj.weight"] == ("tp", None)
    mesh = SimpleNamespace(mesh_dim_names=("fsdp", "tp"), mesh=torch.empty(2, 2))
    on_mesh = partition_specs(model, rules, mesh)
    assert on_mesh["model.layers.1.self_attn.q_proj.weight"] == ("fsdp", "tp")
    assert on_mesh["model.layers.1.self_attn.k_proj.weight"] == (("tp", "fsdp"), None)
    assert on_mesh["model.layers.1.self_attn.o_proj.weight"] == (None, "fsdp")
    assert on_mesh["model.norm.weight"] == ("fsdp",)


def test_the_first_rule_that_matches_decides() -> None:
    model = model_of("llama", tie_word_embeddings=False)
    found = specs_by_rules(model, [("lm_head", None), ("head|embed", ("tp",)), (".*", None)])
    assert found["lm_head.weight"] == (None, None) and found["model.embed_tokens.weight"] == ("tp", None)
    assert len(found) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ([("q_proj", ("tq", None))], ValueError, "'q_proj' names the axis 'tq'; the axes are dp, fsdp"),
        ([("qq_proj", None), (".*", None)], ValueError, "no parameter matches the partition rule 'qq_proj'"),
        ([("(", None)], ValueError, "regular expression"),
        ([("norm", ("tp", None, "dp"))], ValueError, "by the rule 'norm', has 1 dimension"),
        (["norm"], TypeError, "pairs"),
        ([("norm", "tp")], TypeError, "a partition spec is a tuple"),
    ],
)
def test_rules_that_cannot_be_carried_out_are_refused(rules, error, message) -> None:
    with pytest.raises(error, match=message):
        specs_by_rules(model_of("llama"), rules)
