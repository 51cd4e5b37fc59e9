"""Layouts of Flax's layers for a table of one's own: torch computes what Flax does, and every bit comes back."""

import json
import re
from functools import partial

import flax.linen as nn
import jax
import numpy as np
import pytest
import torch
from flax import nnx
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

from easytorch.bridge.convert import convert
from easytorch.bridge.core.nested import flat
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.layouts import (
    attention,
    dense_general,
    einsum,
    gru,
    lstm,
    nnx_gru,
    nnx_lstm,
    nnx_rnn,
    reshaped,
    rnn,
)
from easytorch.bridge.load_tree import load_tree
from easytorch.bridge.rules.user_file import read_rules
from easytorch.bridge.save_tree import save_tree
from easytorch.bridge.state import state_dict_to_tree, tree_to_state_dict

SEED = 20260727


def inputs(*shape):
    return np.random.default_rng(SEED).normal(size=shape).astype(np.float32)


def made(module, *given):
    """A Flax module's parameters, none of them zero, and what it computes."""
    variables = module.init(jax.random.key(SEED), *given)
    rng = np.random.default_rng(SEED)
    variables = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.3).astype(np.float32), variables)
    return variables["params"], module.apply(variables, *given)


def loaded(module, params, rules):
    """`module` with the parameters, which come back from it bit for bit."""
    state = tree_to_state_dict(params, rules)
    module.load_state_dict(state)
    back = flat(state_dict_to_tree(module.state_dict(), rules))
    expected = {"/".join(path): leaf for path, leaf in flatten_dict(params).items()}
    assert back.keys() == expected.keys()
    for path, leaf in expected.items():
        assert back[path].shape == leaf.shape and np.array_equal(back[path], leaf), path
    return module


def close(one, other):
    np.testing.assert_allclose(np.asarray(one), other.detach().numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_attention(bias):
    x = inputs(2, 5, 24)
    params, expected = made(nn.MultiHeadDotProductAttention(num_heads=3, use_bias=bias), x)
    module = torch.nn.MultiheadAttention(24, 3, bias=bias, batch_first=True)
    module = loaded(module, params, _inside(attention, 3, bias))
    given = torch.from_numpy(x)
    close(expected, module(given, given, given)[0])


def _inside(rows, heads, bias):
    """The rows of a module that is the whole model."""
    return tuple(
        (name.removeprefix("a."), tuple(one.removeprefix("a/") for one in _tuple(path)), how)
        for name, path, how in rows("a", "a", heads=heads, bias=bias)
    )


def _tuple(value):
    return (value,) if isinstance(value, str) else value


class Wrapped(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.rnn = module


@pytest.mark.parametrize(
    ("cell", "module", "rows"),
    [(nn.SimpleCell, torch.nn.RNN, rnn), (nn.GRUCell, torch.nn.GRU, gru), (nn.LSTMCell, torch.nn.LSTM, lstm)],
)
def test_recurrent_cells(cell, module, rows):
    x = inputs(2, 6, 5)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.RNN(cell(7, name="rnn"))(x)

    params, expected = made(Model(), x)
    wrapped = loaded(Wrapped(module(5, 7, batch_first=True)), params, rows("rnn", "rnn"))
    close(expected, wrapped.rnn(torch.from_numpy(x))[0])
    # torch's own have two biases that are not zero: Flax gets their sum.
    torch.manual_seed(SEED)
    other = Wrapped(module(5, 7, batch_first=True))
    tree = state_dict_to_tree(other.state_dict(), rows("rnn", "rnn"))
    close(Model().apply({"params": tree}, x), other.rnn(torch.from_numpy(x))[0])
    state = other.state_dict()
    del state["rnn.bias_hh_l0"]
    with pytest.raises(CheckpointError, match=r"bias_hh_l0'?: is missing"):
        state_dict_to_tree(state, rows("rnn", "rnn"))
    with pytest.raises(CheckpointError, match="not those of"):
        state_dict_to_tree(other.state_dict() | {"rnn.bias_hh_l0": torch.ones(5)}, rows("rnn", "rnn"))


@pytest.mark.parametrize(
    ("cell", "module", "rows"),
    [
        (nnx.SimpleCell, torch.nn.RNN, nnx_rnn),
        (nnx.GRUCell, torch.nn.GRU, nnx_gru),
        (nnx.LSTMCell, torch.nn.LSTM, nnx_lstm),
        (nnx.OptimizedLSTMCell, torch.nn.LSTM, partial(nnx_lstm, optimized=True)),
    ],
)
def test_recurrent_cells_of_nnx(cell, module, rows):
    x = inputs(3, 4, 9)
    rng = np.random.default_rng(SEED)

    class Model(nnx.Module):
        def __init__(self):
            self.cell = cell(9, 5, rngs=nnx.Rngs(0))

    def computed(model):
        return nnx.RNN(model.cell, rngs=nnx.Rngs(0))(x)

    model, rules = Model(), rows("rnn", "cell")
    drawn = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), nnx.state(model, nnx.Param))
    nnx.update(model, drawn)
    wrapped = Wrapped(module(9, 5, batch_first=True))
    wrapped.load_state_dict(tree_to_state_dict(model, rules))
    close(computed(model), wrapped.rnn(torch.from_numpy(x))[0])
    back = flat(state_dict_to_tree(wrapped.state_dict(), rules))
    assert {path: leaf.tobytes() for path, leaf in back.items()} == {
        path: np.asarray(leaf).tobytes() for path, leaf in flat(nnx.to_pure_dict(drawn)).items()
    }
    # Two biases that are not zero are their sum; the one that nnx.GRUCell lacks is refused.
    torch.manual_seed(SEED)
    other = Wrapped(module(9, 5, batch_first=True))
    if cell is nnx.GRUCell:
        with pytest.raises(CheckpointError, match=r"new gate's part of bias_hh is not zero"):
            state_dict_to_tree(other.state_dict(), rules)
        torch.nn.init.zeros_(other.rnn.bias_hh_l0[10:])
    nnx.update(model, state_dict_to_tree(other.state_dict(), rules, framework="jax", like=model))
    close(computed(model), other.rnn(torch.from_numpy(x))[0])


@pytest.mark.parametrize(("inner", "outer"), [((8,), (3, 4)), ((2, 4), (5,)), ((2, 4), (3, 5))])
def test_dense_general(inner, outer):
    x = inputs(2, *inner)
    axes = tuple(range(-len(inner), 0))
    params, expected = made(nn.DenseGeneral(outer, axis=axes), x)
    rules = (
        ("weight", "kernel", dense_general(inputs=inner, outputs=outer)),
        ("bias", "bias", reshaped(outer)),
    )
    size = int(np.prod(inner)), int(np.prod(outer))
    module = loaded(torch.nn.Linear(*size), params, rules)
    close(np.asarray(expected).reshape(2, -1), module(torch.from_numpy(x.reshape(2, -1))))
    with pytest.raises(CheckpointError, match="its row of the table says"):
        tree_to_state_dict({"kernel": params["kernel"].transpose(), "bias": params["bias"]}, rules)


@pytest.mark.parametrize(
    ("equation", "shape", "given"),
    [
        ("BTD,DNH->BTNH", (6, 2, 4), (2, 3, 6)),
        ("BTNH,NHD->BTD", (2, 4, 6), (2, 3, 2, 4)),
        ("...D,NDH->...NH", (2, 6, 4), (2, 3, 6)),
        ("BTNH,HND->BTD", (4, 2, 6), (2, 3, 2, 4)),
    ],
)
def test_einsum(equation, shape, given):
    x = inputs(*given)
    params, expected = made(nn.Einsum(shape, equation, use_bias=False), x)
    layout = einsum(equation, shape)
    sizes = layout.torch_shapes(shape)[0]
    module = loaded(torch.nn.Linear(sizes[1], sizes[0], bias=False), params, (("weight", "kernel", layout),))
    close(np.asarray(expected).reshape(2, 3, -1), module(torch.from_numpy(x.reshape(2, 3, -1))))


@pytest.mark.parametrize("equation", ["BTD,DNH", "BTD,BDN->BTN", "BTNH->BTNH", "BTD,DN->BTDN"])
def test_an_einsum_that_is_no_matrix_is_refused(equation):
    with pytest.raises(ValueError, match="is no matrix"):
        einsum(equation, (2, 3, 4)[: len(equation.partition(",")[2].partition("-")[0])])


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_conv_transpose(dimensions, transposed, stride):
    x = inputs(2, *(5, 4, 3)[:dimensions], 3)
    window = (3, 2, 4)[:dimensions]
    strides = (stride,) * dimensions
    module = nn.ConvTranspose(4, window, strides, padding="VALID", transpose_kernel=transposed)
    params, expected = made(module, x)
    name = f"conv_transpose{dimensions}d{'_transposed' if transposed else ''}"
    theirs = getattr(torch.nn, f"ConvTranspose{dimensions}d")(3, 4, window, strides)
    theirs = loaded(theirs, params, (("weight", "kernel", name), ("bias", "bias", "identity")))
    given = torch.from_numpy(np.moveaxis(x, -1, 1).copy())
    found = torch.movedim(theirs(given), 1, -1)
    # Where the stride is longer than the window, Flax pads the end with zeros.
    assert found.shape == expected.shape
    close(expected, found)


TABLE = """
from easytorch.bridge.layouts import lstm

RULES = [["head.weight", "head/kernel", "linear"], ["head.bias", "head/bias", "identity"], *lstm("rnn", "rnn")]
"""


@pytest.fixture
def own_model(tmp_path):
    """A tree, the file of its rules, and the tree's folder, which has no config."""
    gates = {f"{side}{gate}": {"kernel": inputs(5 if side == "i" else 7, 7)} for gate in "ifgo" for side in "ih"}
    for gate in "ifgo":
        gates[f"h{gate}"]["bias"] = inputs(7)
    tree = {"rnn": gates, "head": {"kernel": inputs(7, 3), "bias": inputs(3)}}
    save_tree({**tree, "old": {"a": inputs(2), "b": inputs(2)}}, tmp_path / "tree")
    (tmp_path / "table.py").write_text(TABLE)
    return tree, tmp_path / "table.py", tmp_path / "tree"


def test_a_model_of_ones_own_is_converted_both_ways(own_model, tmp_path):
    from typer.testing import CliRunner

    from easytorch.cli.main import app

    tree, table, folder = own_model
    with pytest.raises(CheckpointError, match=r"old/a'?: no rule of this family names it"):
        convert(folder, tmp_path / "torch", to="torch", rules=table)
    arguments = [
        "convert",
        folder,
        tmp_path / "torch",
        "--to",
        "torch",
        "--rules",
        table,
        "--drop",
        "old/*",
        "--verify",
    ]
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["notes"] == ["dropped: old/*"] and report["tensors"] == 6
    convert(tmp_path / "torch", tmp_path / "back", to="flax", rules=table, verify=True)
    back, expected = flat(load_tree(tmp_path / "back")), flat(tree)
    assert back.keys() == expected.keys()
    assert all(np.array_equal(back[path], leaf) for path, leaf in expected.items())


def test_what_a_table_of_ones_own_lacks_is_said(own_model, tmp_path):
    _, table, folder = own_model
    with pytest.raises(CheckpointError, match=r"no tensor to drop is called so.*nearest known name: 'old/a'"):
        convert(folder, tmp_path / "new", to="torch", rules=table, drop=["old/aa"])
    # One of several leaves that are one tensor is not dropped alone.
    with pytest.raises(CheckpointError, match=r"rnn/ii/kernel'?: is missing, and 'rnn.weight_ih_l0' is made of it"):
        convert(folder, tmp_path / "new", to="torch", rules=table, drop=["old/*", "rnn/ii/kernel"])
    with pytest.raises(CheckpointError, match="both sides have a tree's"):
        convert(folder, tmp_path / "new", to="flax", rules=table, drop=["old/*"])
    with pytest.raises(ValueError, match="there is no such file"):
        convert(folder, tmp_path / "new", to="torch", rules=tmp_path / "nope.py")
    (tmp_path / "empty.py").write_text("RULE = ()")
    with pytest.raises(ValueError, match="does not set RULES to a table"):
        convert(folder, tmp_path / "new", to="torch", rules=tmp_path / "empty.py")
    assert not (tmp_path / "new").exists()


def test_a_table_in_lists_is_one_in_tuples(own_model, tmp_path):
    _, table, folder = own_model
    rows = [[*row] for row in read_rules(table)]
    lists = [[list(part) if isinstance(part, tuple) else part for part in row] for row in rows]
    for number, given in enumerate((rows, lists)):
        convert(folder, tmp_path / f"{number}", to="torch", rules=given, drop=["old/*"])
        tree = load_tree(folder, framework="numpy")
        del tree["old"]
        written = load_file(tmp_path / f"{number}" / "model.safetensors")
        assert tree_to_state_dict(tree, given).keys() == written.keys()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("(1, 'b', 'linear')", "1 is neither a name nor a tuple of names"),
        ("('a', {'b'}, 'linear')", "neither a name nor a tuple of names"),
        ("('a', ('b', 2), 'linear')", "neither a name nor a tuple of names"),
        ("('a', 'b', None)", "None is no layout"),
        ("('a', 'b', {})", "is no layout"),
        ("('a', 'b', lambda array: array.T)", "is no layout; give the name of one, or a Transform"),
        ("('a', 'b')", "a rule is"),
        ("7", "rule 0 is 7; a rule is"),
        ("'abc'", "a rule is"),
        ("(", "table.py, line 1: is no Python"),
    ],
)
def test_a_row_that_is_none_is_said(own_model, tmp_path, row, said):
    (tmp_path / "table.py").write_text(f"RULES = ({row},)")
    with pytest.raises(ValueError, match=re.escape(said)):
        convert(own_model[2], tmp_path / "new", to="torch", rules=tmp_path / "table.py")


def test_what_is_dropped_is_a_list_of_names_as_they_are(tmp_path):
    folder = tmp_path / "mine"
    save_tree({"w[0]": np.ones(2, np.float32), "w0": np.ones(2, np.float32)}, folder)
    rules = (("w", "w0", "identity"),)
    convert(folder, tmp_path / "torch", to="torch", rules=rules, drop=["w[0]"])
    with pytest.raises(TypeError, match="drop is the string 'w0'; give a list of names"):
        convert(folder, tmp_path / "new", to="torch", rules=rules, drop="w0")


def test_a_tensor_nobody_needs_is_dropped(tiny_leaves, save_flax, tmp_path):
    folder = save_flax({**tiny_leaves, "bert/extra/kernel": np.ones((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match="no rule of this family"):
        convert(folder, tmp_path / "new", to="torch")
    for to in ("torch", "flax", "flax-safetensors"):
        report = convert(folder, tmp_path / f"new-{to}", to=to, drop=["bert/extra/*"], verify=True)
        assert report.tensors == len(tiny_leaves)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("heads_out(5)", r"tensor 'a/kernel': a leaf of shape \(6, 4, 2\) has 4 heads, not 5"),
        ("dense_general(inputs=(6,), outputs=(2, 4))", r"tensor 'a/kernel': has shape \(6, 4, 2\), and its row"),
        ("stacked('linear', 5, 0)", r"tensor 'a/kernel': a leaf of shape \(6, 4, 2\) is no stack of 5"),
        ("heads_out(0)", "table.py, line 2: ValueError: 0 heads: give a number of at least 1"),
        ("stacked(7, 2, 0)", r"table.py, line 2: ValueError: stacked\(7, ...\): is no layout"),
        ("stacked('linear', '2', 0)", "table.py, line 2: ValueError: '2' layers of a stack"),
        ("stacked('linear', 2, -1)", "table.py, line 2: ValueError: axis -1 of a stack"),
        ("stacked(joined(heads_out(4), 3), 2, 0)", "line 2: ValueError: stacked.*takes the layout of one tensor"),
        ("joined(heads_out(4), 3)", r"<joined\[split_heads\[4, 0, \(2, 0, 1\)\], 3\]>\): .* does not take 1 torch"),
    ],
)
def test_a_layout_that_does_not_fit_is_said_with_its_place(tmp_path, how, said):
    """The tensor, or the line of the table, without the addresses of functions."""
    save_tree({"a": {"kernel": inputs(6, 4, 2)}}, tmp_path / "tree", config=None)
    names = str(tuple(f"a.{number}" for number in range(5))) if "5, 0" in how else "'a.weight'"
    (tmp_path / "table.py").write_text(
        f"from easytorch.bridge.layouts import *\nRULES = (({names}, 'a/kernel', {how}),)"
    )
    with pytest.raises(ValueError, match=said) as raised:
        convert(tmp_path / "tree", tmp_path / "new", to="torch", rules=tmp_path / "table.py")
    assert "0x" not in str(raised.value)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("size", "stride"), [(4, 1), (5, 2), (3, 3)])
def test_flaxs_default_padding_of_a_transposed_convolution_is_a_crop_in_torch(size, stride, transposed):
    """As docs/bridge.md says."""
    module = nn.ConvTranspose(4, (size,), strides=(stride,), transpose_kernel=transposed)
    given = inputs(2, 5, 3)
    variables = module.init(jax.random.key(0), given)
    layout = "conv_transpose1d_transposed" if transposed else "conv_transpose1d"
    rows = (("weight", "kernel", layout), ("bias", "bias", "identity"))
    theirs = torch.nn.ConvTranspose1d(3, 4, size, stride=stride)
    theirs.load_state_dict(tree_to_state_dict({"params": variables["params"]}, rows))
    made = theirs(torch.from_numpy(given).mT).mT
    kept = made[:, (size - stride) // 2 : made.shape[1] - (size - stride + 1) // 2]
    np.testing.assert_allclose(kept.detach().numpy(), module.apply(variables, given), rtol=1e-5, atol=1e-5)


def test_a_batch_norms_counter_and_collections_are_explained():
    norm = torch.nn.BatchNorm1d(3)
    rows = (
        ("weight", "params/bn/scale", "identity"),
        ("bias", "params/bn/bias", "identity"),
        ("running_mean", "batch_stats/bn/mean", "identity"),
        ("running_var", "batch_stats/bn/var", "identity"),
    )
    with pytest.raises(CheckpointError, match=r"if Flax has no such leaf, \('num_batches_tracked', None, 'buffer'\)"):
        state_dict_to_tree(norm.state_dict(), rows)
    tree = state_dict_to_tree(norm.state_dict(), (*rows, ("num_batches_tracked", None, "buffer")))
    assert tree_to_state_dict(tree, (*rows, ("num_batches_tracked", None, "buffer"))).keys() == {row[0] for row in rows}
    bare = [(name, path.partition("/")[2], how) for name, path, how in rows]
    with pytest.raises(CheckpointError, match=r"they are `params/\.\.\.` and `batch_stats/\.\.\.` there"):
        tree_to_state_dict(tree, bare)
