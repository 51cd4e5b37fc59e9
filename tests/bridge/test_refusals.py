"""What convert, inspect and diff must not do: follow links out, obey a name, lose numbers, write where nobody asked."""

import json
import os
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from easytorch.bridge.convert import convert
from easytorch.bridge.core.casting import CastOverflow, cast
from easytorch.bridge.core.printable import printable
from easytorch.bridge.diff import diff
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.gguf_files.blocks import packed
from easytorch.bridge.inspect import inspect
from easytorch.bridge.state import state_dict_to_tree, tree_to_state_dict
from easytorch.cli.main import app, main

HOSTILE = "a\x1b[31m\u202eb\x07\u2028c"
SEED = 7


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_companions_are_followed_to_files_in_the_folder_alone(tiny_torch, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tiny_torch / "vocab.txt").symlink_to(tmp_path / "secret")
    (tiny_torch / "sub").mkdir()
    (tiny_torch / "sub" / "up.json").symlink_to("../../secret")
    (tiny_torch / "merges.txt").write_text("mine")
    (tiny_torch / "also.txt").symlink_to("merges.txt")
    report = convert(tiny_torch, tmp_path / "new", to="flax")
    assert not any("secret" in file.read_text(errors="replace") for file in (tmp_path / "new").rglob("*.txt"))
    assert not (tmp_path / "new" / "sub" / "up.json").exists()
    assert (tmp_path / "new" / "also.txt").read_text() == "mine"
    assert [note.partition(" is left out")[0].rpartition("/")[2] for note in report.notes] == ["vocab.txt", "up.json"]


def test_what_is_no_file_is_left_out_and_said(tiny_torch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.txt").write_text("secret")
    (tiny_torch / "own").mkdir()
    (tiny_torch / "own" / "kept.txt").write_text("mine")
    (tiny_torch / "linked").symlink_to("own")
    (tiny_torch / "out").symlink_to(tmp_path / "elsewhere")
    (tiny_torch / "broken.txt").symlink_to("nowhere")
    (tiny_torch / "loop.txt").symlink_to("loop.txt")
    os.mkfifo(tiny_torch / "pipe.txt")
    report = convert(tiny_torch, tmp_path / "new", to="flax")
    notes = dict(note.removeprefix(f"{tiny_torch}/").split(" is left out: it is ") for note in report.notes)
    assert notes == {
        "linked": "a link to a folder; copy that there",
        "out": "a link to a folder; copy that there",
        "broken.txt": "a link to nothing",
        "loop.txt": "a link to nothing",
        "pipe.txt": "no regular file",
    }
    assert sorted(path.name for path in (tmp_path / "new").rglob("*.txt")) == ["kept.txt"]


def test_a_path_with_a_null_character(tiny_torch, tmp_path):
    for source, destination in ((tiny_torch, tmp_path / "a\0b"), (tmp_path / "a\0b", tmp_path / "new")):
        for kind in (str, Path):
            with pytest.raises(CheckpointError, match=r"a\\x00b: holds a null character"):
                convert(kind(source), kind(destination), to="flax")
    with pytest.raises(CheckpointError, match="null character"):
        inspect(str(tmp_path / "a\0b"))


def test_snapshots_of_the_hub_are_links_into_its_store(tiny_torch, tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "ab12"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (tiny_torch / "vocab.txt").write_text("words")
    for file in tiny_torch.iterdir():
        file.rename(repository / "blobs" / f"{file.name}-hash")
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}-hash")
    (tmp_path / "secret").write_text("secret")
    (snapshot / "other.txt").symlink_to(tmp_path / "secret")
    report = convert(snapshot, tmp_path / "new", to="flax")
    assert (tmp_path / "new" / "vocab.txt").read_text() == "words"
    assert not (tmp_path / "new" / "other.txt").exists() and len(report.notes) == 1


def test_names_do_not_reach_the_terminal_as_they_are(tmp_path, capsys):
    for name, value in (("one", 1.0), ("two", 2.0)):
        save_file({HOSTILE: np.full(3, value, np.float32), f"{HOSTILE}w": np.ones(2)}, tmp_path / f"{name}.safetensors")
    save_file({f"{HOSTILE}2": np.ones(2)}, tmp_path / "three.safetensors")
    outputs = [
        run("inspect", tmp_path / "one.safetensors").output,
        run("diff", tmp_path / "one.safetensors", tmp_path / "two.safetensors").output,
        run("diff", tmp_path / "one.safetensors", tmp_path / "three.safetensors").output,
    ]
    with pytest.raises(SystemExit):
        main(
            [
                "convert",
                str(tmp_path / "one.safetensors"),
                str(tmp_path / "new"),
                "--to",
                "flax",
                "--drop",
                HOSTILE * 2,
            ]
        )
    outputs.append(capsys.readouterr().err)
    for output in outputs:
        assert r"a\x1b[31m\u202eb\x07\u2028c" in output
        assert output.replace("\n", "").isprintable(), ascii(output)
    assert printable("gelähmt 重 name") == "gelähmt 重 name"
    assert printable("\udc80") == r"\udc80"


def test_json_has_no_infinity(tmp_path):
    def refuse(text):
        raise AssertionError(text)

    save_file({"a": np.zeros(3, np.float32), "b": np.ones(3)}, tmp_path / "one.safetensors")
    save_file({"a": np.array([0, 1, np.nan], np.float32), "b": np.full(3, 2.0)}, tmp_path / "two.safetensors")
    result = run("diff", tmp_path / "one.safetensors", tmp_path / "two.safetensors", "--json")
    content = json.loads(result.output, parse_constant=refuse)
    found = {one["name"]: (one["max_abs"], one["max_rel"]) for one in content["differing"]}
    assert found == {"a": ("Infinity", "Infinity"), "b": (1.0, 1.0)}


FLOATS = ["float64", "float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz"]


@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize("made", FLOATS)
def test_a_number_stays_one_in_every_cast(given, made):
    source, target = (np.dtype(getattr(ml_dtypes, name, name)) for name in (given, made))
    limits = [float(ml_dtypes.finfo(dtype).max) for dtype in (source, target)]
    values = np.random.default_rng(SEED).normal(size=500).astype(source)
    assert cast(values, target).tobytes() == values.astype(target).tobytes()
    special = values.copy()
    special[3] = np.nan
    assert np.isnan(cast(special, target).astype(np.float32)[3])
    largest = values.copy()
    largest[77] = -min(limits) / 2
    cast(largest, target)
    if limits[0] > limits[1]:
        largest[77] = limits[0]
        with pytest.raises(CastOverflow, match=f"the largest {made} is"):
            cast(largest, target)


@pytest.mark.parametrize("value", [0.0, -0.0, -3.0])
def test_a_type_without_zero_and_negatives_says_so(value):
    made = np.dtype(ml_dtypes.float8_e8m0fnu)
    assert cast(np.array([0.5, 8.0], np.float32), made).astype(np.float32).tolist() == [0.5, 8.0]
    with pytest.raises(CastOverflow, match=f"holds {value:.4g}, and .* has neither zero nor negative numbers"):
        cast(np.array([1.0, value], np.float32), made)


def test_an_infinity_that_was_there_stays():
    made = cast(np.array([np.inf, -np.inf, 1.0], np.float32), np.dtype(np.float16))
    assert made.tolist() == [np.inf, -np.inf, 1.0]


@pytest.mark.parametrize("to", ["torch", "flax", "orbax", "gguf"])
def test_a_dtype_too_small_for_a_weight_names_it(tiny_torch, tmp_path, to):
    from safetensors.numpy import load_file

    weights = load_file(tiny_torch / "model.safetensors")
    if to == "gguf":
        with pytest.raises(CastOverflow, match="the largest Q8_0 is"):
            list(packed(np.full((2, 32), 1e7, np.float32), "Q8_0"))
        with pytest.raises(CastOverflow, match=r"the largest float16 is 6\.55e"):
            list(packed(np.full((2, 32), 1e6, np.float32), "F16"))
        return
    for name in ("bert.encoder.layer.1.output.dense.weight", "classifier.bias"):
        spoilt = {**weights, name: weights[name].copy()}
        spoilt[name].flat[-1] = 1e6
        save_file(spoilt, tiny_torch / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"holds 1e\+06, and the largest float16 is 6.55e\+04") as error:
            convert(tiny_torch, tmp_path / "new", to=to, dtype="fp16")
        assert error.value.tensor in (name, name.replace(".", "/").replace("weight", "kernel"))
        convert(tiny_torch, tmp_path / f"bf16 {name}", to=to, dtype="bf16", verify=True)


def test_a_config_linked_from_elsewhere_does_not_go_along(tiny_torch, tmp_path):
    config = tiny_torch / "config.json"
    config.rename(tmp_path / "elsewhere.json")
    config.symlink_to(tmp_path / "elsewhere.json")
    for source, to in ((tiny_torch, "torch"), (tiny_torch, "flax"), (tiny_torch / "model.safetensors", "flax")):
        with pytest.raises(CheckpointError, match=r"config.json: is a link to a file outside .*--config"):
            convert(source, tmp_path / "new", to=to)
        assert not (tmp_path / "new").exists()
    convert(tiny_torch, tmp_path / "new", to="flax", config=tmp_path / "elsewhere.json")
    assert json.loads((tmp_path / "new/config.json").read_text()) == json.loads(config.read_text())


@pytest.mark.parametrize("name", ["a.bin", "a.gguf", "a.msgpack", "a.ckpt", "a.BIN", "a.SafeTensors", "config.json"])
def test_a_file_name_of_another_format_makes_no_folder(tiny_flax, tmp_path, name):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=rf"ends in \{Path(name).suffix}, and .*\*\.safetensors"):
        convert(tiny_flax, tmp_path / name, to="torch")
    assert sorted(tmp_path.iterdir()) == before


def test_a_destination_stands_outside_of_its_source(tiny_flax, tmp_path):
    (tmp_path / "link").symlink_to(tiny_flax)
    for inside in (tiny_flax / "new", tiny_flax / "deeper" / "new", tmp_path / "link" / "new"):
        with pytest.raises(CheckpointError, match="stands inside the source"):
            convert(tiny_flax, inside, to="torch")
        assert not inside.exists() and not (tiny_flax / "deeper").exists()
    convert(tiny_flax / "flax_model.msgpack", tiny_flax / "new.safetensors", to="torch")


def test_a_config_is_what_the_user_names(tiny_flax, tmp_path):
    (tmp_path / "empty").mkdir()
    for config, message in (
        ("nope.json", "nope.json: there is no such config"),
        ("empty", "empty: there is no config"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(tiny_flax, tmp_path / "new", to="torch", config=tmp_path / config)
    (tiny_flax / "config.json").rename(tmp_path / "bert.txt")
    convert(tiny_flax, tmp_path / "new", to="torch", config=tmp_path / "bert.txt")


def test_packed_elements_stay_packed_in_gguf(tmp_path):
    gguf = pytest.importorskip("gguf")
    import transformers

    size = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **size)).save_pretrained(tmp_path / "llama")
    convert(tmp_path / "llama", tmp_path / "q8.gguf", to="gguf", dtype="q8_0")
    convert(tmp_path / "q8.gguf", tmp_path / "again.gguf", to="gguf", verify=True)
    first, again = (gguf.GGUFReader(tmp_path / name) for name in ("q8.gguf", "again.gguf"))
    kinds = {tensor.name: (tensor.tensor_type, tensor.data.tobytes()) for tensor in first.tensors}
    assert {tensor.name: (tensor.tensor_type, tensor.data.tobytes()) for tensor in again.tensors} == kinds
    assert again.fields["general.file_type"].parts[-1] == first.fields["general.file_type"].parts[-1]
    found = inspect(tmp_path / "q8.gguf")
    packed = {one["name"]: one for one in found.to_dict()["tensors"]}["blk.0.ffn_up.weight"]
    assert packed == {
        "name": "blk.0.ffn_up.weight",
        "shape": [256, 256],
        "dtype": "float32",
        "bytes": 256 * 256 // 32 * 34,
        "packed": "Q8_0",
    }
    assert found.total_bytes < (tmp_path / "q8.gguf").stat().st_size
    assert "Q8_0  69.6 KB" in run("inspect", tmp_path / "q8.gguf").output
    # Another dtype is another packing, and what is asked for.
    convert(tmp_path / "q8.gguf", tmp_path / "wide.gguf", to="gguf", dtype="f32")
    assert diff(tmp_path / "q8.gguf", tmp_path / "wide.gguf").same


@pytest.mark.parametrize("kind", ["int4", "uint4"])
@pytest.mark.parametrize("copy", [None, False, True])
def test_four_bits_are_no_tensor(kind, copy):
    array = np.arange(6).astype(getattr(ml_dtypes, kind))
    with pytest.raises(CheckpointError, match=f"'w': is {kind}, with which torch cannot compute; cast it to u?int8"):
        tree_to_state_dict({"w": array}, (("w", "w", "identity"),), copy=copy)


ROWS = (
    ("norm.weight", "norm/scale", "identity"),
    ("norm.bias", "norm/bias", "identity"),
    ("out.weight", "out/kernel", "linear"),
    ("norm.count", None, "buffer"),
)
LAYERS = (
    ("h.{i}.norm.weight", "h/{i}/norm/scale", "identity"),
    ("h.{i}.norm.bias", "h/{i}/norm/bias", "identity"),
    ("h.{i}.{p:q|o}.weight", "h/{i}/{p}/kernel", "linear"),
    ("h.{i}.{p:q|o}.bias", "h/{i}/{p}/bias", "identity"),
    ("head.weight", "head/kernel", "linear"),
)


def test_what_the_rules_name_is_not_left_out_silently():
    import torch

    tree = {"norm": {"scale": np.ones(2), "bias": np.ones(2)}, "out": {"kernel": np.ones((2, 3))}}
    state = tree_to_state_dict(tree, ROWS)
    for leaf, tensor in (("scale", "norm.weight"), ("bias", "norm.bias")):
        less = {"norm": {key: value for key, value in tree["norm"].items() if key != leaf}, "out": tree["out"]}
        with pytest.raises(CheckpointError, match=f"{tensor}'?: is missing"):
            tree_to_state_dict(less, ROWS)
        assert len(tree_to_state_dict(less, ROWS, complete=False)) == 2
        with pytest.raises(CheckpointError, match=f"{tensor}'?: is missing"):
            state_dict_to_tree({name: value for name, value in state.items() if name != tensor}, ROWS)
    layer = {
        f"{p}.{leaf}": torch.ones(2, 2) if leaf == "weight" else torch.ones(2) for p in "qo" for leaf in ("weight",)
    }
    layer |= {"norm.weight": torch.ones(2), "norm.bias": torch.ones(2), "q.bias": torch.ones(2)}
    state = {f"h.{i}.{name}": tensor for i in range(3) for name, tensor in layer.items()}
    # No layer has a bias of `o`, and nothing a head: the table is a family's.
    made = tree_to_state_dict(state_dict_to_tree(state, LAYERS), LAYERS)
    assert made.keys() == state.keys()
    for name in ("h.1.norm.bias", "h.2.q.bias", "h.0.norm.weight"):
        with pytest.raises(CheckpointError, match=f"{name}'?: is missing"):
            state_dict_to_tree({one: tensor for one, tensor in state.items() if one != name}, LAYERS)


def test_what_gguf_needs_is_said(tiny_torch, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)  # as where it is not installed
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tiny_torch), str(tmp_path / "new"), "--to", "gguf"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip() == "error: GGUF files need the gguf package: pip install gguf"


def test_names_of_emoji_are_names(tiny_torch, tmp_path, monkeypatch):
    (tmp_path / ":bug:").mkdir()
    monkeypatch.chdir(tmp_path / ":bug:")
    for output in (
        run("convert", tiny_torch, "../:bug:/new", "--to", "flax").output,
        run("inspect", "../:bug:/new").output,
    ):
        assert "../:bug:/new: " in output


def test_weights_are_no_config(tiny_torch, tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors: holds weights and is no config\.json"):
        convert(tiny_torch, tmp_path / "out", to="flax", config=tiny_torch / "model.safetensors")


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs/x")
    with pytest.raises(CheckpointError, match=r"no weights found, and links to nothing: model\.safetensors"):
        convert(tmp_path, tmp_path / "out", to="flax")


def test_checkpoints_whose_names_say_no_step_are_listed(tiny_torch, tmp_path):
    run = tmp_path / "run"
    for name in ("best", "checkpoints/last"):
        shutil.copytree(tiny_torch, run / name)
    state = {name: torch.from_numpy(array) for name, array in load_file(tiny_torch / "model.safetensors").items()}
    torch.save({"state_dict": state, "epoch": 1}, run / "epoch=1.ckpt")
    shutil.copy(tiny_torch / "config.json", run)
    with pytest.raises(CheckpointError, match=r"one that is inside: best, checkpoints/last, epoch=1\.ckpt$"):
        convert(run, tmp_path / "out", to="flax")
    # Each can be given then.
    for number, name in enumerate(("best", "checkpoints/last", "epoch=1.ckpt")):
        assert convert(run / name, tmp_path / f"flax-{number}", to="flax").tensors > 20
    for number in range(20):
        (run / f"model-{number}.pt").touch()
    with pytest.raises(CheckpointError, match=r"model-12\.pt and 15 more$"):
        convert(run, tmp_path / "out", to="flax")
