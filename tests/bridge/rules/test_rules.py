"""Rule tables: read in both directions, refused when they cannot be."""

import numpy as np
import pytest

from easytorch.bridge.convert import convert
from easytorch.bridge.core.nested import flat
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.rules.plan import plan_from_torch, plan_to_torch
from easytorch.bridge.rules.table import compile_rules
from easytorch.bridge.rules.transforms import Transform, get_transform, register_transform
from easytorch.bridge.state import state_dict_to_tree, tree_to_state_dict
from easytorch.models.bert import RULES as BERT
from easytorch.models.llama import RULES as LLAMA

TABLES = pytest.mark.parametrize("rules", [BERT, LLAMA], ids=["bert", "llama"])


@TABLES
def test_every_rule_reads_back_what_it_wrote(rules):
    table = compile_rules(rules)
    assert table.weights
    for rule in table.weights:
        bindings = tuple(
            sorted(
                {part[0]: (part[1] or ("7",))[-1] for part in rule.flax.components if not isinstance(part, str)}.items()
            )
        )
        path, names = rule.flax.fill(bindings), [pattern.fill(bindings) for pattern in rule.torch]
        assert table.flax_rule(path) == (rule, bindings)
        assert [table.torch_rule(name) for name in names] == [(rule, part, bindings) for part in range(len(names))]
        array = np.random.default_rng(0).normal(size=(2, 3, 4, 5)[: rule.transform.rank or 1])
        there = rule.transform.to_torch(array)
        assert [one.shape for one in there] == list(rule.transform.torch_shapes(array.shape))
        assert rule.transform.flax_shape([one.shape for one in there]) == array.shape
        np.testing.assert_array_equal(rule.transform.to_flax(there), array)


@pytest.mark.parametrize(
    ("name", "torch_shape", "flax_shape"),
    [
        ("identity", (2, 3), (2, 3)),
        ("linear", (2, 3), (3, 2)),
        ("conv1d", (2, 3, 4), (4, 3, 2)),
        ("conv2d", (2, 3, 4, 5), (4, 5, 3, 2)),
    ],
)
def test_layouts(name, torch_shape, flax_shape):
    transform = get_transform(name)
    array = np.arange(np.prod(torch_shape)).reshape(torch_shape)
    assert transform.to_flax([array]).shape == transform.flax_shape([torch_shape]) == flax_shape
    assert transform.to_flax([array]).base is not None, "a view, not a copy"
    np.testing.assert_array_equal(transform.to_torch(transform.to_flax([array]))[0], array)


def test_prefix_on_both_sides_or_neither():
    table = compile_rules(BERT)
    for prefix, path in (("bert.", "bert/"), ("", "")):
        rule, _, bindings = table.torch_rule(f"{prefix}pooler.dense.weight")
        assert rule.flax.fill(bindings) == f"{path}pooler/dense/kernel"
    assert table.torch_rule("model.pooler.dense.weight") is None


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((("a.weight", "a/kernel", "linear"), ("{x}.weight", "{x}/b", "linear")), "ambiguous"),
        ((("a.{x:b|c}", "a/{x}", "identity"), ("{y}.c", "{y}/d", "identity")), "ambiguous"),
        ((("a.{x}.w", "c/{x}/w", "identity"), ("b.{x}.w", "c/{x}/w", "identity")), "ambiguous"),
        ((("[p.]a.w", "[p/]a/w", "identity"), ("p.a.w", "q/w", "identity")), "ambiguous"),
        ((("a.{x}.w", "a/w", "identity"),), "one side only"),
        ((("[p.]a.w", "a/w", "identity"),), "on both sides or on neither"),
        ((("a.w", "a/w", "no such thing"),), "no transform is called 'no such thing'; known: conv1d"),
        ((("a.w", None, "identity"),), "buffer"),
        ((("a.w", "a/w", "buffer"),), "buffer"),
        ((("a.w", "a/w"),), "a rule is"),
        ((("a.x{y}.w", "a/x{y}/w", "identity"),), "neither a name nor one variable"),
        ((("a.{x:b|c}.w", "a/{x:c|b}/w", "identity"),), "two lists of choices"),
        (((("a.q", "a.k"), "a/qk", "identity"),), "does not take 2 torch patterns"),
    ],
)
def test_bad_tables_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        compile_rules(rules)


@pytest.fixture
def transforms(monkeypatch):
    """Transforms registered by a test are forgotten after it."""
    from easytorch.bridge.rules import transforms

    monkeypatch.setattr(transforms, "_TRANSFORMS", dict(transforms._TRANSFORMS))


def test_a_transform_without_an_inverse_is_refused(transforms):
    one_way = Transform(
        name="norm", to_flax=lambda a: a[0], to_torch=None, flax_shape=lambda s: s[0], torch_shapes=lambda s: (s,)
    )
    register_transform(one_way)
    with pytest.raises(ValueError, match="no inverse"):
        compile_rules((("one.way", "one/way", "norm"),))
    with pytest.raises(ValueError, match="registered already"):
        register_transform(one_way)


def test_several_torch_tensors_make_one_leaf(transforms):
    register_transform(
        Transform(
            name="fused_pair",
            to_flax=lambda arrays: np.concatenate([array.T for array in arrays], axis=1),
            to_torch=lambda array: tuple(part.T for part in np.split(array, 2, axis=1)),
            flax_shape=lambda shapes: (shapes[0][1], 2 * shapes[0][0]),
            torch_shapes=lambda shape: ((shape[1] // 2, shape[0]),) * 2,
            rank=2,
            parts=2,
        )
    )
    rules = ((("h.{i}.gate.weight", "h.{i}.up.weight"), "h/{i}/gate_up/kernel", "fused_pair"),)
    leaf = np.arange(24, dtype=np.float32).reshape(3, 8)
    state = tree_to_state_dict({"h": {"0": {"gate_up": {"kernel": leaf}}}}, rules)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "h.0.gate.weight": (4, 3),
        "h.0.up.weight": (4, 3),
    }
    np.testing.assert_array_equal(flat(state_dict_to_tree(state, rules))["h/0/gate_up/kernel"], leaf)
    del state["h.0.up.weight"]
    with pytest.raises(CheckpointError, match=r"h\.0\.up\.weight.*is missing"):
        state_dict_to_tree(state, rules)


def _infos(*names, shape=(2, 2)):
    return {name: TensorInfo(name, shape, "float32", "x.safetensors") for name in names}


def _never(one, other):
    return False


def test_unknown_names_tell_the_nearest_known():
    table = compile_rules(BERT)
    with pytest.raises(
        CheckpointError, match=r"attention\.self\.qurey\.weight.*nearest.*attention\.self\.query\.weight"
    ):
        plan_from_torch(_infos("bert.encoder.layer.3.attention.self.qurey.weight"), table, tie=True, same=_never)
    with pytest.raises(CheckpointError, match=r"pooler/dens/kernel.*nearest known name: 'bert/pooler/dense/kernel'"):
        plan_to_torch(_infos("bert/pooler/dens/kernel"), table, tie=True, same=_never)
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.weight.*shape \(2,\).*2 dimensions"):
        plan_from_torch(_infos("pooler.dense.weight", shape=(2,)), table, tie=True, same=_never)


def test_norms_that_transformers_saves_under_old_names(tmp_path):
    """ESM's: `LayerNorm.gamma` in files of transformers 5, `LayerNorm.weight` in those on the Hub and in memory."""
    import torch
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = transformers.EsmConfig(vocab_size=30, pad_token_id=1, mask_token_id=2, **sizes)
    model = transformers.EsmForMaskedLM(settings)
    model.save_pretrained(tmp_path / "torch")
    for to in ("flax", "easydel"):
        convert(tmp_path / "torch", tmp_path / to, to=to)
        convert(tmp_path / to, tmp_path / f"{to} back", to="torch")
        back, info = transformers.EsmForMaskedLM.from_pretrained(tmp_path / f"{to} back", output_loading_info=True)
        assert not any(info.values())
        assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_legacy_names_are_aliases():
    table = compile_rules(BERT)
    plan = plan_from_torch(
        _infos("embeddings.LayerNorm.gamma", "embeddings.LayerNorm.beta"), table, tie=True, same=_never
    )
    assert {step.sources[0]: step.targets[0].name for step in plan.steps} == {
        "embeddings.LayerNorm.gamma": "embeddings/LayerNorm/scale",
        "embeddings.LayerNorm.beta": "embeddings/LayerNorm/bias",
    }
    with pytest.raises(CheckpointError, match="stands twice"):
        plan_from_torch(
            _infos("embeddings.LayerNorm.gamma", "embeddings.LayerNorm.weight"), table, tie=True, same=_never
        )
