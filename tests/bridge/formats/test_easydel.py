"""EasyDeL's checkpoints, against its rules stated once more, as plainly as possible.

What its own converter and eformer's own reader and writer make of such models was compared with this by hand (EasyDeL
0.3.0, eformer 0.0.101: they cannot be installed beside the tests).
"""

import json
import re

import ml_dtypes
import msgpack
import numpy as np
import pytest
import tensorstore
import torch
import transformers
from flax.serialization import to_bytes
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file
from safetensors.torch import save_file as save_torch_file

from easytorch.bridge import convert, inspect
from easytorch.bridge.core.array_source import ArraySource
from easytorch.bridge.core.nested import nested
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.msgpack_files import stream
from easytorch.bridge.formats.msgpack_files.easydel_msgpack import EasydelMsgpack
from easytorch.bridge.formats.zarr_folders.easydel_store import EasydelStore
from easytorch.bridge.load_tree import load_tree
from easytorch.protocol import conversion

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
HEADS = SIZES | {"num_key_value_heads": 2}
TOWER = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**HEADS)),
    "tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**HEADS, tie_word_embeddings=True)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16)
    ),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES, max_position_embeddings=20)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**HEADS, num_local_experts=11)),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**HEADS, head_dim=4, num_local_experts=3)
    ),
    "siglip": lambda: transformers.SiglipModel(
        transformers.SiglipConfig(
            text_config=TOWER | {"vocab_size": 32, "max_position_embeddings": 8},
            vision_config=TOWER | {"image_size": 8, "patch_size": 4},
        )
    ),
}


def easydel_leaves(model, state_dict):
    """`process_tensor`, `apply_moe_transformations` and gpt_oss's `reform_param`, without their special cases."""
    modules, leaves, experts = dict(model.named_modules()), {}, {}
    for name, array in state_dict.items():
        module = modules.get(name.rpartition(".")[0])
        path = name.replace(".", "/")
        if found := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(f"{found[1]}.{found[3]}/kernel".replace(".", "/"), {})[int(found[2])] = array.T
        elif "experts.gate_up_proj" in name:
            leaf = "bias" if name.endswith("_bias") else "kernel"
            for which, start in (("gate_proj", 0), ("up_proj", 1)):
                leaves[f"{path.rpartition('/')[0]}/{which}/{leaf}"] = array[..., start::2]
        elif "experts.down_proj" in name:
            leaves[f"{path.rpartition('/')[0]}/down_proj/{'bias' if name.endswith('_bias') else 'kernel'}"] = array
        elif isinstance(module, torch.nn.Embedding):
            leaves[path.removesuffix("weight") + "embedding"] = array
        elif isinstance(module, torch.nn.LayerNorm):
            leaves[path.replace("/weight", "/scale")] = array
        elif "weight" in name:
            order = {2: (1, 0), 3: (2, 1, 0), 4: (2, 3, 1, 0)}.get(array.ndim, tuple(range(array.ndim)))
            leaves[path.replace("/weight", "/kernel")] = array.transpose(order)
        else:
            leaves[path] = array
    return leaves | {path: np.stack([stack[number] for number in sorted(stack)]) for path, stack in experts.items()}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    made = MODELS[request.param]()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape).sin() / 9 + number / 99)
    folder = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(folder)
    return made, folder


@pytest.mark.parametrize("target", ["easydel", "easydel-msgpack"])
def test_the_leaves_are_easydels(target, model, tmp_path):
    made, folder = model
    state_dict = load_file(folder / "model.safetensors")
    convert(folder, tmp_path / "easydel", to=target, verify=True)
    format_ = EasydelStore() if target == "easydel" else EasydelMsgpack()
    expected = easydel_leaves(made, state_dict)
    with format_.open(format_.detect(tmp_path / "easydel")) as reader:
        assert set(reader.tensors) == set(expected)
        for name, leaf in expected.items():
            np.testing.assert_array_equal(reader.read(name), leaf, err_msg=name)
    convert(tmp_path / "easydel", tmp_path / "torch", to="torch")
    assert (tmp_path / "torch/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert {file.name for file in (tmp_path / "torch").iterdir()} == {file.name for file in folder.iterdir()}


LLAMA = transformers.LlamaConfig(**HEADS | {"num_hidden_layers": 1})


@pytest.fixture(scope="module")
def llama_leaves():
    made = transformers.LlamaForCausalLM(LLAMA)
    return easydel_leaves(made, {name: tensor.detach().numpy() for name, tensor in made.state_dict().items()})


def write_stream(file, leaves):
    packer = msgpack.Packer()
    file.write_bytes(b"".join(packer.pack((tuple(name.split("/")), to_bytes(leaf))) for name, leaf in leaves.items()))


def test_an_old_state(llama_leaves, tmp_path):
    """`EasyDeLState.save_state`: the parameters two levels down, text, numbers and an optimizer beside them."""
    LLAMA.save_pretrained(tmp_path / "easydel")
    leaves = {f"params/params/{name}": leaf for name, leaf in llama_leaves.items()}
    leaves |= {"step": 3, "opt_state/0/mu": np.ones(3), "hyperparameters/model_type": "llama", "tx": None}
    write_stream(tmp_path / "easydel/state.easy", leaves)
    convert(tmp_path / "easydel", tmp_path / "torch", to="torch", verify=True)
    found = load_file(tmp_path / "torch/model.safetensors")
    np.testing.assert_array_equal(found["lm_head.weight"], llama_leaves["lm_head/kernel"].T)
    with EasydelMsgpack().open(tmp_path / "easydel/state.easy") as reader:
        assert reader.metadata == {"hyperparameters/model_type": '"llama"', "tx": "null"}


def test_norms_of_other_versions(llama_leaves, tmp_path):
    """RMSNorm's leaf has been called `scale` too."""
    LLAMA.save_pretrained(tmp_path / "easydel")
    leaves = {name.replace("norm/kernel", "norm/scale"): leaf for name, leaf in llama_leaves.items()}
    assert set(leaves) != set(llama_leaves)
    write_stream(tmp_path / "easydel/model.easydel", leaves)
    convert(tmp_path / "easydel", tmp_path / "torch", to="torch")
    found = load_file(tmp_path / "torch/model.safetensors")
    np.testing.assert_array_equal(found["model.norm.weight"], llama_leaves["model/norm/kernel"])


def test_a_tied_model_that_kept_its_head(llama_leaves, tmp_path):
    """EasyDeL's graph of a tied model holds an lm_head that nothing reads: which of the two is meant, is asked."""
    tied = transformers.LlamaConfig(**LLAMA.to_dict() | {"tie_word_embeddings": True})
    source = tmp_path / "easydel"
    tied.save_pretrained(source)
    leaves = dict(llama_leaves)
    write_stream(source / "model.easydel", leaves)
    with pytest.raises(CheckpointError, match=r"lm_head/kernel.*differs from model/embed_tokens/embedding"):
        convert(source, tmp_path / "torch", to="torch")
    with pytest.raises(CheckpointError, match="lm_head/kernel"):
        conversion.from_flax(transformers.LlamaForCausalLM, tied, nested(leaves))
    LLAMA.save_pretrained(tmp_path / "untied")
    convert(source, tmp_path / "own", to="torch", config=tmp_path / "untied")
    found = load_file(tmp_path / "own/model.safetensors")
    np.testing.assert_array_equal(found["lm_head.weight"], leaves["lm_head/kernel"].T)
    leaves["lm_head/kernel"] = leaves["model/embed_tokens/embedding"].T
    write_stream(source / "model.easydel", leaves)
    report = convert(source, tmp_path / "one", to="torch", verify=True)
    assert report.tied == ("lm_head.weight",)
    assert "lm_head.weight" not in load_file(tmp_path / "one/model.safetensors")


@pytest.mark.parametrize("family", [transformers.T5Config, transformers.MT5Config])
@pytest.mark.parametrize("to", ["easydel", "easydel-msgpack"])
def test_the_head_of_an_untied_t5(tmp_path, family, to):
    """transformers 5 reads every T5's config as tied, whatever config.json says."""
    config = family(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    model.save_pretrained(tmp_path / "torch")
    file = tmp_path / "torch/model.safetensors"
    head = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32))
    save_torch_file(load_torch_file(file) | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    settings = json.loads((tmp_path / "torch/config.json").read_text())
    for declared in (False, True):
        text = json.dumps(settings | {"tie_word_embeddings": declared})
        (tmp_path / "torch/config.json").write_text(text)
        if declared and family is transformers.T5Config:
            with pytest.raises(CheckpointError, match=r"lm_head\.weight.*EasyDeL computes"):
                convert(tmp_path / "torch", tmp_path / "refused", to=to)
            continue
        there, back = tmp_path / f"there-{declared}", tmp_path / f"back-{declared}"
        convert(tmp_path / "torch", there, to=to, verify=True)
        np.testing.assert_array_equal(load_tree(there)["lm_head"]["kernel"], head.T)
        assert json.loads((there / "config.json").read_text())["tie_word_embeddings"] is False
        convert(there, back, to="torch", verify=True)
        assert torch.equal(load_torch_file(back / "model.safetensors")["lm_head.weight"], head)


def test_safetensors(llama_leaves, tmp_path):
    LLAMA.save_pretrained(tmp_path / "easydel")
    dotted = {name.replace("/", "."): np.ascontiguousarray(leaf) for name, leaf in llama_leaves.items()}
    save_file(dotted, tmp_path / "easydel/easydel-model.parameters")
    assert inspect(tmp_path / "easydel").scheme == "easydel"
    convert(tmp_path / "easydel", tmp_path / "torch", to="torch")
    found = load_file(tmp_path / "torch/model.safetensors")
    np.testing.assert_array_equal(found["lm_head.weight"], llama_leaves["lm_head/kernel"].T)


ARRAYS = {
    "a/b": np.arange(24, dtype=np.float32).reshape(4, 6).astype(ml_dtypes.bfloat16),
    "a/0": np.full((3, 2), -0.0, np.float16),
    "fp8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
    "count": np.array(7, np.int64),
    "zeros": np.zeros((2, 3), np.float64),
    "mask": np.array([True, False]),
    "none": np.zeros((0, 3), np.float32),
}


def written(format_, folder, arrays):
    infos = [TensorInfo(name, array.shape, array.dtype.name) for name, array in arrays.items()]
    layout, source = format_.layout(infos, 1), ArraySource(arrays)
    for file, group in layout.items():
        format_.write(folder, file, group, source)
    format_.finish(folder, layout, source)
    return format_.open(format_.detect(folder))


@pytest.mark.parametrize("format_", [EasydelStore(), EasydelMsgpack()], ids=lambda format_: format_.name)
def test_every_dtype_bit_for_bit(format_, tmp_path):
    with written(format_, tmp_path, ARRAYS) as reader:
        assert set(reader.tensors) == set(ARRAYS)
        for name, array in ARRAYS.items():
            found = reader.read(name)
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("chunk", [2**30, 20])
def test_the_stream_is_what_flax_would_write(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "CHUNK_BYTES", chunk)
    monkeypatch.setattr("flax.serialization.MAX_CHUNK_SIZE", chunk)
    written(EasydelMsgpack(), tmp_path, ARRAYS).close()
    write_stream(tmp_path / "theirs", ARRAYS)
    assert (tmp_path / "model.easydel").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_the_store_is_read_by_tensorstore_itself(tmp_path):
    written(EasydelStore(), tmp_path, ARRAYS).close()
    index = json.loads((tmp_path / "tensorstore_index.json").read_text())
    for entry in index["prefixes"]["model"]:
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(tmp_path / entry["path"])}}
        opened = tensorstore.open(spec).result()
        assert (list(opened.shape), opened.dtype.name) == (entry["shape"], entry["dtype"])


def test_the_last_step_and_the_model_of_several_trees(tmp_path):
    for step in (9, 10):
        written(EasydelStore(), tmp_path / f"run-{step}", {"step": np.array(step)}).close()
    index = tmp_path / "run-10/tensorstore_index.json"
    content = json.loads(index.read_text())
    content["prefixes"]["tx"] = [{"path": "tx/mu", "shape": [1], "dtype": "float32"}]
    index.write_text(json.dumps(content))
    with EasydelStore().open(EasydelStore().detect(tmp_path)) as reader:
        assert reader.read("step") == 10
        assert reader.metadata == {"not read": "tx"}


def edit_json(name, change):
    def edit(folder):
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def set_entry(**fields):
    return edit_json("tensorstore_index.json", lambda index: index["prefixes"]["model"][0].update(fields))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda folder: (folder / "tensorstore_index.json").write_text("{"), "not valid JSON"),
        (edit_json("tensorstore_index.json", lambda index: index.update(format="zip")), "the format 'zip'"),
        (edit_json("tensorstore_index.json", lambda index: index.update(prefixes=[])), "no arrays of a model"),
        (edit_json("tensorstore_index.json", lambda index: index.update(prefixes=7)), "are no table"),
        (set_entry(path="../../etc"), "no folder beside it"),
        (set_entry(path="/etc"), "no folder beside it"),
        (set_entry(path=3), "has no path"),
        (set_entry(path="model/count"), "twice"),
        (set_entry(shape=[6, 4]), "the index says bfloat16"),
        (set_entry(dtype="float16"), "the index says float16"),
        (lambda folder: (folder / "model/a/b/.zarray").unlink(), "its data is missing"),
        (lambda folder: (folder / "model/a/b/0.0").unlink(), "0 of 1 chunks"),
        (lambda folder: (folder / "model/a/b/.zarray").write_text("[" * 9999), "zarr metadata"),
        (edit_json("model/a/b/.zarray", lambda array: array.update(shape=[2**40, 2**20])), "chunks|cannot be"),
        (edit_json("model/a/b/.zarray", lambda array: array.update(chunks=[2**40, 6])), "larger than its shape"),
        (edit_json("model/a/b/.zarray", lambda array: array.update(dtype="|O")), "element type"),
        (edit_json("model/a/b/.zarray", lambda array: array.update(compressor={"id": "x"})), "cannot be read"),
        (lambda folder: (folder / "model/a/b/0.0").write_bytes(b"\x28\xb5\x2f\xfd"), "cannot be read"),
    ],
)
def test_a_damaged_store(damage, match, tmp_path):
    written(EasydelStore(), tmp_path, ARRAYS).close()
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=match):
        EasydelStore().open(tmp_path / "tensorstore_index.json").read("a/b")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\x81\xa1a\x01", "no stream of pairs"),
        (msgpack.packb((["a"], b"")), "truncated or corrupt"),
        (msgpack.packb((["a"], to_bytes(np.ones(3)) + b"x")), "shorter than its bytes"),
        (msgpack.packb((["a"], to_bytes(np.ones(3))))[:-4], "truncated or corrupt"),
        (msgpack.packb((["a"], 3)), "not bytes"),
        (msgpack.packb(([], to_bytes(np.ones(3)))), "not a list of 1 to"),
        (msgpack.packb(([1.5], to_bytes(np.ones(3)))), "neither a name nor a number"),
        (msgpack.packb((["a"], to_bytes(np.ones(3)))) * 2, "twice"),
        (msgpack.packb((["a"], to_bytes(np.ones(3)))) + msgpack.packb((["a", "b"], to_bytes(np.ones(3)))), "twice"),
        (b"\x92" + b"\xdd\xff\xff\xff\xff", "not a list of 1 to"),
    ],
)
def test_a_damaged_stream(content, match, tmp_path):
    (tmp_path / "model.easydel").write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        EasydelMsgpack().open(tmp_path / "model.easydel")


def test_what_the_store_cannot_hold():
    for name, dtype, match in (
        ("a/../b", "float32", "plain names"),
        ("a.b", "float32", "plain"),
        ("a", "uint4", "uint4"),
    ):
        with pytest.raises(CheckpointError, match=match):
            EasydelStore().layout([TensorInfo(name, (1,), dtype)], 1)
    with pytest.raises(CheckpointError, match="4 GiB"):
        EasydelMsgpack().layout([TensorInfo("a", (2**30,), "float32")], 1)
