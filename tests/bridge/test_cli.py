"""`easytorch convert` and `easytorch inspect` as a user meets them."""

import json

import pytest

from easytorch.cli.main import main


@pytest.fixture
def run(capsys):
    """Runs the command line: exit code, standard output, standard error."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


def test_convert_and_inspect(run, tiny_flax, tmp_path):
    code, out, _ = run("convert", tiny_flax, tmp_path / "torch", "--to", "torch", "--dtype", "bf16", "--verify")
    assert code == 0
    assert "41 tensors" in out
    assert "verified" in out
    code, out, _ = run("inspect", tmp_path / "torch")
    assert code == 0
    assert "torch safetensors, BertForSequenceClassification, 41 tensors" in out
    assert "8x12  bfloat16  192 B" in out.replace("12x8", "8x12")


def test_json(run, tiny_flax, tmp_path):
    arguments = ("convert", tiny_flax, tmp_path / "torch", "--to", "torch", "--max-shard-size", "2KB", "--json")
    code, out, err = run(*arguments)
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["tensors"] == 41
    assert len(report["files"]) > 1
    code, out, _ = run("inspect", tmp_path / "torch", "--json")
    info = json.loads(out)
    assert code == 0
    assert info["format"] == "torch safetensors"
    assert info["model_type"] == "bert"
    assert info["total_bytes"] == sum(tensor["bytes"] for tensor in info["tensors"]) == report["bytes"]
    assert {"name": "classifier.bias", "shape": [2], "dtype": "float32", "bytes": 8} in info["tensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "nothing", "new", "--to", "flax"), "nothing: does not exist"),
        (("convert", "flax", "flax", "--to", "torch"), "exists already"),
        (("convert", "flax", "new", "--to", "onnx"), "known targets: torch, flax"),
        (("convert", "flax", "new", "--to", "torch", "--dtype", "int4"), "not a floating point type"),
        (("convert", "flax", "new", "--to", "torch", "--max-shard-size", "x"), "not a size"),
        (("convert", "empty", "new", "--to", "torch"), "no weights found"),
        (("convert", "broken", "new", "--to", "torch"), "truncated"),
        (("inspect", "broken"), "truncated"),
        (("inspect", "nothing"), "does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, tiny_flax, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_bytes((tiny_flax / "config.json").read_bytes())
    (tmp_path / "broken" / "flax_model.msgpack").write_bytes((tiny_flax / "flax_model.msgpack").read_bytes()[:-1])
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["convert", "inspect"])
def test_help_has_examples(run, name):
    code, out, _ = run(name, "--help")
    assert code == 0
    assert f"easytorch {name} ./bert-base" in out
