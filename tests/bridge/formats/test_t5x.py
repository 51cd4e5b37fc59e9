"""T5X's checkpoints, against what transformers' conversion scripts say of their names."""

import json
import re

import ml_dtypes
import msgpack
import numpy as np
import pytest
import tensorstore
import torch
import transformers
from flax.serialization import msgpack_restore, msgpack_serialize
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file

from easytorch.bridge import convert
from easytorch.bridge.core.array_source import ArraySource
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.zarr_folders.t5x_folder import T5xFolder

SIZES = {"d_model": 12, "d_kv": 5, "d_ff": 20, "num_heads": 3, "vocab_size": 23, "num_layers": 2, "dropout_rate": 0.0}
SIZES |= {"relative_attention_num_buckets": 8}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MODELS = {
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES)),
    "t5 v1.1": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**SIZES, **GATED, num_decoder_layers=1)
    ),
    "encoder": lambda: transformers.T5EncoderModel(transformers.T5Config(**SIZES, is_encoder_decoder=False)),
    "longt5": lambda: transformers.LongT5ForConditionalGeneration(
        transformers.LongT5Config(**SIZES, **GATED, encoder_attention_type="transient-global")
    ),
    "umt5": lambda: transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**SIZES, **GATED)),
    "switch": lambda: transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(
            **SIZES, num_experts=3, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
        )
    ),
}
HEADS = SIZES["num_heads"]


def t5x_leaves(state_dict, per_layer_positions=False):
    """The names of `convert_t5x_checkpoint_to_pytorch.py` and its like, read the other way."""
    leaves, experts = {}, {}
    swaps = (
        (r"(encoder|decoder)\.block\.(\d+)\.layer\.\d\.", r"\1/layers_\2/"),
        (r"encoder/(layers_\d+)/(\w*Self)Attention\.", r"encoder/\1/attention."),
        (r"decoder/(layers_\d+)/SelfAttention\.", r"decoder/\1/self_attention."),
        (r"EncDecAttention\.", "encoder_decoder_attention."),
        (r"DenseReluDense\.", "mlp."),
        (r"attention\.q\b", "attention.query"),
        (r"attention\.k\b", "attention.key"),
        (r"attention\.v\b", "attention.value"),
        (r"attention\.o\b", "attention.out"),
        (r"attention\.global_input_layer_norm\.weight", "attention.T5LayerNorm_0.scale"),
        (r"(encoder|decoder)\.final_layer_norm\.weight", r"\1/\1_norm/scale"),
        (r"lm_head", "decoder/logits_dense"),
        (r"router\.classifier", "router.router_weights.w"),
    )
    norms = {
        "encoder": ["pre_attention_layer_norm", "pre_mlp_layer_norm"],
        "decoder": ["pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm"],
    }
    for name, array in state_dict.items():
        if name == "shared.weight":
            leaves["token_embedder/embedding"] = array
        elif found := re.fullmatch(r"(encoder|decoder)\.block\.(\d+)\.layer\.(\d)\.layer_norm\.weight", name):
            leaves[f"{found[1]}/layers_{found[2]}/{norms[found[1]][int(found[3])]}/scale"] = array
        elif found := re.fullmatch(
            r"(encoder|decoder)\.block\.(\d+)\..*\.(global_)?relative_attention_bias\.weight", name
        ):
            module = "side_relpos_bias" if found[3] else "relpos_bias"
            layer = f"layers_{found[2]}/" if per_layer_positions else ""
            leaves[f"{found[1]}/{layer}{module}/rel_embedding"] = array.T
        else:
            for old, new in swaps:
                name = re.sub(old, new, name)
            name = name.replace(".weight", ".kernel").replace(".", "/")
            array = array.T if array.ndim == 2 else array
            if found := re.fullmatch(r"(.+)/experts/expert_(\d+)/(.+)", name):
                experts.setdefault(f"{found[1]}/expert/{found[3]}", {})[int(found[2])] = array
            else:
                leaves[name] = array
    return leaves | {name: np.stack([stack[number] for number in sorted(stack)]) for name, stack in experts.items()}


def scanned(leaves, heads_apart):
    """`encoder/layers_0/x` ... as `encoder/encoder/x` with the layers on axis 1, as UMT5 was published."""
    stacks, made = {}, {}
    for name, leaf in leaves.items():
        if found := re.fullmatch(r"(encoder|decoder)/layers_(\d+)/(.+)", name):
            if heads_apart and found[3].endswith(("query/kernel", "key/kernel", "value/kernel")):
                leaf = leaf.reshape(len(leaf), HEADS, -1)
            elif heads_apart and found[3].endswith("out/kernel"):
                leaf = leaf.reshape(HEADS, -1, leaf.shape[1])
            stacks.setdefault(f"{found[1]}/{found[1]}/{found[3]}", {})[int(found[2])] = leaf
        else:
            made[name] = leaf
    return made | {name: np.stack([stack[at] for at in sorted(stack)], 1) for name, stack in stacks.items()}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    made = MODELS[request.param]()
    if request.param in ("t5 v1.1", "longt5", "umt5"):
        made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=generator)
    folder = tmp_path_factory.mktemp("torch")
    made.save_pretrained(folder)
    leaves = t5x_leaves(load_file(folder / "model.safetensors"), per_layer_positions=request.param == "umt5")
    with torch.no_grad():
        output = made.eval()(**inputs_of(made))[0]
    return folder, scanned(leaves, heads_apart=True) if request.param == "umt5" else leaves, output


def inputs_of(model):
    inputs = {"input_ids": torch.tensor([[3, 4, 5, 1]])}
    return inputs | ({"decoder_input_ids": torch.tensor([[0, 7]])} if model.config.is_encoder_decoder else {})


def write_t5x(folder, leaves, inline=()):
    """As `Checkpointer.save` does, with tensorstore and flax alone: gzip, whole chunks, the training state beside."""
    specs = {}
    for name, leaf in (leaves | {"../state/param_states/x/v": np.ones(3)}).items():
        path = f"target/{name}".replace("target/../", "")
        if name in inline:
            specs[path] = np.asarray(leaf)
            continue
        metadata = {"compressor": {"id": "gzip"}, "shape": list(leaf.shape), "chunks": list(leaf.shape)}
        spec = {"driver": "zarr", "dtype": leaf.dtype.name, "metadata": metadata}
        spec["kvstore"] = {"driver": "file", "path": path.replace("/", ".") + "/"}
        here = spec | {"kvstore": {"driver": "file", "path": f"{folder}/{path.replace('/', '.')}/"}}
        tensorstore.open(here, create=True).result().write(leaf).result()
        specs[path] = spec
    tree = unflatten_dict(specs | {"state/step": np.int32(7)}, sep="/")
    folder.mkdir(exist_ok=True)
    (folder / "checkpoint").write_bytes(msgpack_serialize({"version": 3, "optimizer": tree}))


def load_t5x(folder):
    """As `load_t5x_checkpoint` does: the specs in the msgpack file are opened beside it."""
    content = msgpack_restore((folder / "checkpoint").read_bytes())
    assert content["version"] == 3

    def is_spec(path, value):
        return isinstance(value, dict) and "driver" in value

    leaves = {}
    for path, spec in flatten_dict(content["optimizer"]["target"], sep="/", is_leaf=is_spec).items():
        for key in ("chunks", "compressor"):
            del spec["metadata"][key]
        spec["kvstore"]["path"] = f"{folder}/{spec['kvstore']['path']}"
        leaves[path] = tensorstore.open(spec, open=True).result().read().result()
    return leaves


def same_tensors(one, other):
    found, expected = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_written_as_the_scripts_read_it(model, tmp_path):
    folder, leaves, _ = model
    convert(folder, tmp_path / "t5x", to="t5x")
    found = load_t5x(tmp_path / "t5x")
    assert set(found) == set(leaves)
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)
    convert(tmp_path / "t5x", tmp_path / "torch", to="torch")
    same_tensors(tmp_path / "torch", folder)
    assert {file.name for file in (tmp_path / "torch").iterdir()} == {file.name for file in folder.iterdir()}


def test_read_without_a_config(model, tmp_path):
    """A training checkpoint in the folder of its model: sizes are read off the shapes, the optimizer is left out."""
    folder, leaves, output = model
    write_t5x(tmp_path / "run/checkpoint_900", leaves, inline=("encoder/encoder_norm/scale",))
    report = convert(tmp_path / "run", tmp_path / "torch", to="torch")
    assert any("left out (state)" in note for note in report.notes)
    same_tensors(tmp_path / "torch", folder)
    theirs = json.loads((folder / "config.json").read_text())
    ours = json.loads((tmp_path / "torch/config.json").read_text())
    known = ("model_type", "d_model", "d_kv", "d_ff", "num_heads", "num_layers", "num_decoder_layers", "vocab_size")
    known += ("relative_attention_num_buckets", "feed_forward_proj", "architectures", "num_experts")
    assert {key: ours[key] for key in known if key in theirs} == {key: theirs[key] for key in known if key in theirs}
    loaded = getattr(transformers, ours["architectures"][0]).from_pretrained(tmp_path / "torch").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs_of(loaded))[0], output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads_apart", [False, True])
def test_scanned_layers(heads_apart, tmp_path):
    """`examples/scalable_t5` keeps one matrix a projection, flaxformer an axis for the heads."""
    config = transformers.UMT5Config(**SIZES, **GATED)
    made = transformers.UMT5ForConditionalGeneration(config)
    made.save_pretrained(tmp_path / "torch")
    leaves = t5x_leaves(load_file(tmp_path / "torch/model.safetensors"), per_layer_positions=True)
    write_t5x(tmp_path / "scanned", scanned(leaves, heads_apart))
    write_t5x(tmp_path / "a tree a layer", leaves)
    for name in ("scanned", "a tree a layer"):
        convert(tmp_path / name, tmp_path / f"{name} again", to="torch", config=tmp_path / "torch")
        same_tensors(tmp_path / f"{name} again", tmp_path / "torch")


def test_what_shapes_do_not_tell(tmp_path):
    """A local LongT5 has T5's weights, so it takes the config to say so."""
    config = transformers.LongT5Config(**SIZES, **GATED)
    transformers.LongT5ForConditionalGeneration(config).save_pretrained(tmp_path / "torch")
    leaves = t5x_leaves(load_file(tmp_path / "torch/model.safetensors"))
    write_t5x(tmp_path / "t5x", leaves)
    convert(tmp_path / "t5x", tmp_path / "again", to="torch", config=tmp_path / "torch")
    same_tensors(tmp_path / "again", tmp_path / "torch")


def test_a_family_without_names(tmp_path):
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(CheckpointError, match="no names for 'bert'"):
        convert(tmp_path / "bert", tmp_path / "out", to="t5x")


ARRAYS = {
    "target/a/b": np.arange(24, dtype=np.float32).reshape(4, 6).astype(ml_dtypes.bfloat16),
    "target/c": np.zeros((2, 3), np.float32),
    "target/d": np.array(3, np.int32),
}


def write_arrays(folder):
    format_ = T5xFolder()
    infos = [TensorInfo(name, array.shape, array.dtype.name) for name, array in ARRAYS.items()]
    layout, source = format_.layout(infos, 1), ArraySource(ARRAYS)
    for file, group in layout.items():
        format_.write(folder, file, group, source)
    format_.finish(folder, layout, source)
    return format_.detect(folder)


def test_bits_survive(tmp_path):
    with T5xFolder().open(write_arrays(tmp_path)) as reader:
        for name, array in ARRAYS.items():
            found = reader.read(name)
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert reader.read("state/step") == 0


def with_spec(**fields):
    def edit(folder):
        content = msgpack.unpackb((folder / "checkpoint").read_bytes())
        content["optimizer"]["target"]["a"]["b"].update(fields)
        (folder / "checkpoint").write_bytes(msgpack.packb(content))

    return edit


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (with_spec(kvstore={"driver": "file", "path": "../../etc/"}), "no folder beside it"),
        (with_spec(kvstore={"driver": "file", "path": "/etc"}), "no folder beside it"),
        (with_spec(kvstore=3), "no path"),
        (with_spec(kvstore={"driver": "file", "path": "target.z/"}), "its data is missing"),
        (lambda folder: (folder / "target.a.b/0.0").unlink(), "0 of 1 chunks"),
        (lambda folder: (folder / "target.a.b/0.0").write_bytes(b"x"), "cannot be read"),
        (lambda folder: (folder / "target.a.b/.zarray").write_text("{}"), "zarr metadata"),
        (lambda folder: (folder / "checkpoint").write_bytes(b"\x81"), "truncated"),
        (lambda folder: (folder / "checkpoint").write_bytes(b"\x81\xa1a" * 99), "nested deeper"),
    ],
)
def test_a_damaged_checkpoint(damage, match, tmp_path):
    file = write_arrays(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=match):
        T5xFolder().open(file).read("target/a/b")
