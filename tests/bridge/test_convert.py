"""`convert`: bit-exact both ways, tied weights, shards, and every input it must refuse."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from easytorch.bridge.convert import convert
from easytorch.bridge.core.nested import flat
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.inspect import inspect
from easytorch.bridge.load_tree import load_tree
from easytorch.bridge.save_tree import save_tree
from easytorch.bridge.state import load_torch_state_dict

FAMILIES = pytest.mark.parametrize("family", ["bert", "llama"])


def assert_same_state(one, other):
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)), name


@FAMILIES
@pytest.mark.parametrize("size", ["5GB", "30KB"])
def test_recorded_checkpoints_come_back_byte_for_byte(flax_fixture, tmp_path, family, size):
    source = flax_fixture(family)
    convert(source, tmp_path / "torch", to="torch", max_shard_size=size, verify=True)
    convert(tmp_path / "torch", tmp_path / "flax", to="flax", max_shard_size=size, verify=True)
    convert(tmp_path / "flax", tmp_path / "again", to="flax")
    assert (tmp_path / "again" / "flax_model.msgpack").read_bytes() == (source / "flax_model.msgpack").read_bytes()
    assert (tmp_path / "flax" / "flax_model.msgpack.index.json").exists() == (size == "30KB")
    assert (tmp_path / "torch" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@FAMILIES
def test_transformers_computes_what_flax_did(flax_fixture, tmp_path, family):
    import transformers

    source = flax_fixture(family)
    case, reference = json.loads((source / "case.json").read_text()), np.load(source / "reference.npz")
    convert(source, tmp_path / "torch", to="torch", max_shard_size="30KB")
    model = getattr(transformers, case["torch_class"]).from_pretrained(tmp_path / "torch").eval()
    inputs = {key[6:]: torch.from_numpy(reference[key]).long() for key in reference if key.startswith("input.")}
    with torch.no_grad():
        got = model(**inputs)[case["output"]].numpy()
    expected = reference[f"output.{case['output']}"]
    if got.ndim == 3:
        unmasked = reference["input.attention_mask"].astype(bool)
        got, expected = got[unmasked], expected[unmasked]
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_minilm_comes_back_bit_for_bit(minilm, tmp_path):
    report = convert(minilm, tmp_path / "flax", to="flax")
    assert report.kept == ("embeddings.position_ids",)
    assert "embeddings" in load_tree(tmp_path / "flax")
    assert "position_ids" not in load_tree(tmp_path / "flax")["embeddings"]
    convert(tmp_path / "flax", tmp_path / "torch", to="torch")
    assert (tmp_path / "torch" / "model.safetensors").read_bytes() == (minilm / "model.safetensors").read_bytes()
    copied = {str(file.relative_to(tmp_path / "torch")) for file in (tmp_path / "torch").rglob("*") if file.is_file()}
    there = {str(file.relative_to(minilm)) for file in minilm.rglob("*") if file.is_file()}
    assert copied == {name for name in there if not name.startswith(".")}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "bool"])
def test_every_dtype_is_bit_exact(tiny_leaves, save_flax, tmp_path, dtype):
    element = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(1)
    leaves = {}
    for path, leaf in tiny_leaves.items():
        raw = rng.integers(0, 2 if dtype == "bool" else 256, (*leaf.shape, element.itemsize), dtype=np.uint8)
        leaves[path] = raw.view(element)[..., 0]
    source = save_flax(leaves)
    convert(source, tmp_path / "torch", to="torch", verify=True)
    assert {info.dtype for info in inspect(tmp_path / "torch").tensors} == {dtype}
    convert(tmp_path / "torch", tmp_path / "flax-again", to="flax", verify=True)
    back = flat(load_tree(tmp_path / "flax-again"))
    assert {path: leaf.tobytes() for path, leaf in back.items()} == {
        path: leaf.tobytes() for path, leaf in leaves.items()
    }


def test_cast(tiny_flax, tiny_leaves, tmp_path):
    convert(tiny_flax, tmp_path / "half", to="torch", dtype="bf16", verify=True)
    state = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    expected = torch.from_numpy(tiny_leaves["classifier/kernel"].T.copy()).bfloat16()
    assert torch.equal(state["classifier.weight"], expected)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="'int8' is not a floating point type"):
        convert(tiny_flax, tmp_path / "new", to="torch", dtype="int8")


def test_pickles_become_safetensors_or_flax(tiny_torch, tmp_path):
    state = load_file(tiny_torch / "model.safetensors")
    (tiny_torch / "model.safetensors").unlink()
    torch.save(state, tiny_torch / "pytorch_model.bin")
    convert(tiny_torch, tmp_path / "safe", to="torch")
    assert_same_state(load_file(tmp_path / "safe" / "model.safetensors"), dict(sorted(state.items())))
    assert not (tmp_path / "safe" / "pytorch_model.bin").exists()
    convert(tiny_torch / "pytorch_model.bin", tmp_path / "new-flax", to="flax", verify=True)


BERT_LM = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 20,
}
LLAMA_LM = {**BERT_LM, "num_key_value_heads": 1}


def saved_model(name, config_name, folder, **config):
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config_name)(**config)).eval()
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(folder)
    return model


def logits(model):
    with torch.no_grad():
        return model(torch.arange(1, 8)[None])[0]


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("name", "config_name", "config", "kernel"),
    [
        ("BertForMaskedLM", "BertConfig", BERT_LM, "cls/predictions/decoder/kernel"),
        ("BertForPreTraining", "BertConfig", BERT_LM, "cls/predictions/decoder/kernel"),
        ("BertLMHeadModel", "BertConfig", {**BERT_LM, "is_decoder": True}, "cls/predictions/decoder/kernel"),
        ("LlamaForCausalLM", "LlamaConfig", LLAMA_LM, "lm_head/kernel"),
    ],
)
def test_language_models_tied_and_not(tmp_path, name, config_name, config, kernel, tie):
    model = saved_model(name, config_name, tmp_path / "torch", **config, tie_word_embeddings=tie)
    convert(tmp_path / "torch", tmp_path / "flax", to="flax", verify=True)
    # Flax's BERT shares the embedding when it is tied; Flax's Llama has a kernel of its own always.
    assert (kernel in flat(load_tree(tmp_path / "flax"))) == (not tie or "Llama" in name)
    convert(tmp_path / "flax", tmp_path / "back", to="torch", verify=True)
    assert_same_state(*(load_file(tmp_path / folder / "model.safetensors") for folder in ("torch", "back")))
    again, info = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(again.eval()), logits(model), rtol=0, atol=0)


def test_a_stored_repeat_of_a_tied_weight_is_stored_again(tmp_path):
    saved_model("BertForMaskedLM", "BertConfig", tmp_path / "torch", **BERT_LM)
    file = tmp_path / "torch" / "model.safetensors"
    state = load_file(file)
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"].clone()
    state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"].clone()
    save_file(state, file, metadata={"format": "pt"})
    report = convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    assert set(report.tied) == {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    convert(tmp_path / "flax", tmp_path / "back", to="torch")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "head",
    ["Model", "ForNextSentencePrediction", "ForMultipleChoice", "ForTokenClassification", "ForQuestionAnswering"],
)
def test_every_other_bert_head(tmp_path, head):
    saved_model(f"Bert{head}", "BertConfig", tmp_path / "torch", **BERT_LM)
    round_trip(tmp_path)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "head", ["Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
)
def test_every_other_llama_head(tmp_path, head, tie):
    config = {**LLAMA_LM, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": tie}
    saved_model(f"Llama{head}", "LlamaConfig", tmp_path / "torch", **config)
    round_trip(tmp_path)
    assert "lm_head" not in load_tree(tmp_path / "flax")


def round_trip(folder):
    convert(folder / "torch", folder / "flax", to="flax", verify=True)
    convert(folder / "flax", folder / "back", to="torch", verify=True)
    assert_same_state(*(load_file(folder / name / "model.safetensors") for name in ("torch", "back")))


def test_flax_weights_as_a_torch_state_dict(tiny_torch, tmp_path):
    state = load_file(tiny_torch / "model.safetensors")
    state["bert.embeddings.position_ids"] = torch.arange(16)[None]
    save_file(state, tiny_torch / "model.safetensors")
    convert(tiny_torch, tmp_path / "new", to="flax")
    before = (tmp_path / "new" / "flax_model.msgpack").read_bytes()
    loaded = load_torch_state_dict(tmp_path / "new")
    assert_same_state(dict(sorted(loaded.items())), dict(sorted(state.items())))
    for tensor in loaded.values():
        tensor.zero_()
    assert (tmp_path / "new" / "flax_model.msgpack").read_bytes() == before
    loaded_tree, tree_of_torch = flat(load_tree(tmp_path / "new")), flat(load_tree(tiny_torch))
    assert all(np.array_equal(loaded_tree[path], tree_of_torch[path]) for path in loaded_tree)


def edit_state(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def edit_config(folder, **changes):
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(content))


QUERY = "bert.encoder.layer.1.attention.self.query.weight"
BAD_CHECKPOINTS = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "config is not JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json: is not valid JSON"),
    "no model_type": (lambda folder: edit_config(folder, model_type=None), "`model_type` is None"),
    "path as model_type": (lambda folder: edit_config(folder, model_type="../bert"), "`model_type` is '../bert'"),
    "unknown family": (
        lambda folder: edit_config(folder, model_type="bret"),
        "config.json: .*'bret' .nearest known name: 'bert'",
    ),
    "unknown class": (
        lambda folder: edit_config(folder, architectures=["BertForSequenceClass"]),
        "BertForSequenceClassif",
    ),
    "unknown head": (lambda folder: edit_config(folder, architectures=["BertLMHead"]), "nearest .*'BertLMHeadModel'"),
    "class of another family": (
        lambda folder: edit_config(folder, architectures=["LlamaModel"]),
        "unknown architecture",
    ),
    "sizes of no model": (
        lambda folder: edit_config(folder, hidden_size="big"),
        "describes no model that can be built .Validation error for field .hidden_size.: TypeError.* expected int",
    ),
    "too many layers": (
        lambda folder: edit_config(folder, num_hidden_layers=10**9),
        "`num_hidden_layers` is 1000000000",
    ),
    "no layers": (
        lambda folder: edit_config(folder, num_hidden_layers=0),
        "layer.0.*left over: `num_hidden_layers` is 0",
    ),
    "fewer layers than none": (lambda folder: edit_config(folder, num_hidden_layers=-1), "`num_hidden_layers` is -1"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights found"),
    "truncated": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
        "truncated",
    ),
    "missing weight": (lambda folder: edit_state(folder, lambda s: s.pop(QUERY)), f"{QUERY}.*is missing"),
    "missing head": (
        lambda folder: edit_state(folder, lambda s: s.pop("classifier.bias")),
        "classifier.bias.*is missing",
    ),
    "unknown weight": (lambda folder: edit_state(folder, lambda s: s.update(extra=torch.ones(1))), "'extra'.*no rule"),
    "left-over layer": (lambda folder: edit_config(folder, num_hidden_layers=1), "layer.1.*left over"),
    "wrong shape": (
        lambda folder: edit_state(folder, lambda s: s.update({QUERY: torch.ones(8, 7)})),
        rf"{QUERY}.*\(8, 7\).*needs \(8, 8\)",
    ),
    "wrong rank": (lambda folder: edit_state(folder, lambda s: s.update({QUERY: torch.ones(8)})), "needs 2 dimensions"),
    "no tensors": (lambda folder: save_file({}, folder / "model.safetensors"), "no tensors"),
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_bad_torch_checkpoints(tiny_torch, tmp_path, case):
    damage, message = BAD_CHECKPOINTS[case]
    damage(tiny_torch)
    with pytest.raises(CheckpointError, match=message):
        convert(tiny_torch, tmp_path / "new", to="flax")
    assert [file.name for file in tmp_path.iterdir()] == ["torch"], "something was left behind"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda leaves: leaves.pop("bert/pooler/dense/kernel"), "bert.pooler.dense.weight.*is missing"),
        (lambda leaves: leaves.update({"bert/poler/kernel": np.ones((2, 2))}), "bert/poler/kernel.*no rule"),
        (lambda leaves: leaves.update({"classifier/bias": np.ones(3, "f4")}), r"classifier.bias.*\(3,\).*needs \(2,\)"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_bad_flax_checkpoints(tiny_leaves, save_flax, tmp_path, change, message):
    change(tiny_leaves)
    with pytest.raises(CheckpointError, match=rf"flax_model\.msgpack: .*{message}"):
        convert(save_flax(tiny_leaves), tmp_path / "new", to="torch")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("family", "sizes", "key"),
    [
        ("Bert", {}, "num_hidden_layers"),
        ("Llama", {}, "num_hidden_layers"),
        ("GPT2", {"n_embd": 8, "n_layer": 2, "n_head": 2}, "n_layer"),
        ("T5", {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "num_layers": 2}, "num_layers"),
        ("T5", {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "num_layers": 2}, "num_decoder_layers"),
    ],
)
@pytest.mark.parametrize("layers", [0, -2])
def test_layers_that_the_config_denies(tmp_path, family, sizes, key, layers):
    """To a tree and back: transformers builds a model without layers of such a config, and no weight is missing."""
    common = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(vocab_size=20, **(sizes or common))
    getattr(transformers, f"{family}Model")(config).save_pretrained(tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    for source, to in (("torch", "flax"), ("torch", "orbax"), ("flax", "torch")):
        edit_config(tmp_path / source, **{key: layers})
        # Where the table is made of the model it has no rows for layers then, and T5's decoder looks like another tree.
        with pytest.raises(CheckpointError, match=rf"`{key}` is {layers}\b|no rule of this family|several trees"):
            convert(tmp_path / source, tmp_path / "new", to=to)
        assert not (tmp_path / "new").exists()


def test_bad_arguments(tiny_flax, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tiny_flax, tmp_path / "there", to="torch")
    with pytest.raises(ValueError, match="known targets: torch, flax"):
        convert(tiny_flax, tmp_path / "new", to="onnx")
    with pytest.raises(ValueError, match="not a size"):
        convert(tiny_flax, tmp_path / "new", to="torch", max_shard_size="5 apples")
    with pytest.raises(CheckpointError, match="does not exist"):
        convert(tmp_path / "nothing", tmp_path / "new", to="torch")


def test_heads_the_architecture_does_not_have_are_carried_along(tiny_torch, tmp_path):
    """Hub checkpoints of a masked language model hold a pooler and the next-sentence head too."""
    edit_state(tiny_torch, lambda state: state.update({"cls.seq_relationship.bias": torch.ones(2)}))
    convert(tiny_torch, tmp_path / "new", to="flax", verify=True)
    assert "cls/seq_relationship/bias" in flat(load_tree(tmp_path / "new"))


def test_progress_and_report(tiny_flax, tmp_path):
    calls = []
    report = convert(tiny_flax, tmp_path / "new", to="torch", progress=lambda *call: calls.append(call))
    assert len(calls) == report.tensors == len(inspect(tmp_path / "new").tensors)
    assert calls[-1][1] == calls[-1][2] == report.bytes
    json.dumps(report.to_dict())


def test_other_weights_are_not_copied(tiny_flax, tmp_path):
    for name in ("tf_model.h5", "optimizer.pt", "vocab.txt", ".hidden"):
        (tiny_flax / name).write_text("x")
    (tiny_flax / "sub").mkdir()
    shutil.copy(tiny_flax / "vocab.txt", tiny_flax / "sub" / "more.txt")
    convert(tiny_flax, tmp_path / "new", to="torch")
    files = {str(file.relative_to(tmp_path / "new")) for file in (tmp_path / "new").rglob("*") if file.is_file()}
    assert files == {"config.json", "model.safetensors", "vocab.txt", "sub/more.txt"}


@pytest.mark.parametrize("leaf", [None, "text", np.zeros(2, object)], ids=repr)
def test_a_tree_of_anything_but_arrays_is_refused(tmp_path, leaf):
    with pytest.raises(CheckpointError, match=r"tensor 'a/b': .*not an array of numbers"):
        save_tree({"a": {"b": leaf}}, tmp_path / "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "extra", "to"),
    [
        ("Bert", {"embeddings.position_ids": torch.arange(16)[None]}, "gguf"),
        ("Llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, "gguf"),
        ("Llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, "maxtext"),
        ("Gemma", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, "gemma"),
    ],
)
def test_what_old_checkpoints_hold_besides_goes_there_and_back(tmp_path, family, extra, to) -> None:
    """Position tables that transformers saved once: no naming scheme has a place for them."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    kind = transformers.BertModel if family == "Bert" else getattr(transformers, f"{family}ForCausalLM")
    model = kind(kind.config_class(**sizes, vocab_size=40, max_position_embeddings=16))
    model.save_pretrained(tmp_path / "torch")
    file = tmp_path / "torch/model.safetensors"
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    report = convert(tmp_path / "torch", tmp_path / "out", to=to)
    assert set(extra) <= set(report.kept)
    convert(tmp_path / "out", tmp_path / "back", to="torch")
    assert load_file(tmp_path / "back/model.safetensors").keys() == load_file(file).keys()
    with pytest.raises(CheckpointError, match="lm_haed"):
        save_file(load_file(file) | {"lm_haed.weight": torch.ones(40, 16)}, file, metadata={"format": "pt"})
        convert(tmp_path / "torch", tmp_path / "other", to=to)


def test_the_head_of_t5_1_1_is_no_repeat_and_the_config_is_not_blamed(tmp_path) -> None:
    sizes = {"vocab_size": 31, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, feed_forward_proj="gated-gelu"))
    model.save_pretrained(tmp_path / "torch")
    file = tmp_path / "torch/model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.ones(31, 8)}, file, metadata={"format": "pt"})
    config = tmp_path / "torch/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    (note,) = convert(tmp_path / "torch", tmp_path / "flax", to="flax").notes
    assert note.startswith("lm_head.weight differs from shared.weight") and "config" not in note
    convert(tmp_path / "flax", tmp_path / "back", to="torch")
    assert torch.equal(load_file(tmp_path / "back/model.safetensors")["lm_head.weight"], torch.ones(31, 8))


def test_what_one_file_has_no_place_for_is_said(tmp_path) -> None:
    """llama.cpp runs BERT for its embeddings: the head stands beside a GGUF file in a folder, and not in one alone."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=40)).save_pretrained(tmp_path / "torch")
    kept = {"pooler.dense.weight", "pooler.dense.bias"}
    report = convert(tmp_path / "torch", tmp_path / "folder", to="gguf", verify=True)
    assert kept <= set(report.kept) and not any("left out" in note for note in report.notes)
    report = convert(tmp_path / "torch", tmp_path / "bert.gguf", to="gguf", verify=True)
    (note,) = [note for note in report.notes if "left out" in note]
    assert report.kept == () and all(name in note for name in kept)
