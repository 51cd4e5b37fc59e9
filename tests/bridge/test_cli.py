"""`easytorch convert` and `easytorch inspect` as a user meets them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def test_which_step_is_read_and_what_is_dropped(run, tiny_torch, tmp_path):
    state = load_file(tiny_torch / "model.safetensors")
    for step in (1, 2):
        shutil.copytree(tiny_torch, tmp_path / f"run/checkpoint-{step}")
        state["classifier.bias"] = torch.full((2,), float(step))
        of_step = state | {"old.weight": torch.ones(2)}
        save_file(of_step, tmp_path / f"run/checkpoint-{step}/model.safetensors", metadata={"format": "pt"})
    arguments = ("convert", tmp_path / "run", tmp_path / "new", "--to", "torch", "--step", 1)
    assert run(*arguments, "--drop", "old.*")[0] == 0
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert "old.weight" not in found and found["classifier.bias"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["convert", "inspect"])
def test_help_has_examples(run, name):
    code, out, _ = run(name, "--help")
    assert code == 0
    assert f"easytorch {name} ./bert-base" in out


def test_diff(run, tiny_flax, tmp_path):
    run("convert", tiny_flax, tmp_path / "torch", "--to", "torch")
    code, out, _ = run("diff", tiny_flax, tmp_path / "torch")
    assert (code, out) == (0, "the same: 41 tensors\n")
    run("convert", tiny_flax, tmp_path / "half", "--to", "torch", "--dtype", "fp16")
    code, out, _ = run("diff", tmp_path / "torch", tmp_path / "half", "--json")
    found = json.loads(out)
    assert code == 1
    assert not found["same"]
    assert len(found["differing"]) == 41
    worst = max(found["differing"], key=lambda one: one["max_abs"])
    assert 0 < worst["max_abs"] < 2e-3 and 0 < worst["max_rel"] <= 2**-11
    assert {one["second"]["dtype"] for one in found["differing"]} == {"float16"}


def test_diff_says_what_differs(run, tiny_torch, tmp_path):
    state = load_file(tiny_torch / "model.safetensors")
    state["classifier.bias"] = state["classifier.bias"] + torch.tensor([0.0, 0.5])
    state["classifier.weight"] = torch.zeros(3, 8)
    state["more"] = state.pop("bert.pooler.dense.bias")
    save_file(state, tmp_path / "other.safetensors", metadata={"format": "pt"})
    code, out, _ = run("diff", tiny_torch, tmp_path / "other.safetensors")
    assert code == 1
    assert "- bert.pooler.dense.bias\n+ more\n" in out
    assert "~ classifier.bias  max abs 0.5, max relative" in out
    assert "~ classifier.weight  shape (2, 8) against (3, 8)" in out
    assert "40 tensors in both, 2 differ" in out
    code, _, _ = run("diff", tiny_torch / "model.safetensors", tiny_torch, "--tolerance", "1")
    assert code == 0


def test_help_has_examples_and_completion_the_formats(run):
    for command in ("convert", "inspect", "diff"):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert f"easytorch {command} ./" in out
    environment = {**os.environ, "_EASYTORCH_COMPLETE": "complete_bash", "COMP_CWORD": "5"}
    environment["COMP_WORDS"] = "easytorch convert a b --to fla"
    done = subprocess.run(
        [sys.executable, "-m", "easytorch"], env=environment, capture_output=True, text=True, timeout=600
    )
    assert "flax" in done.stdout.split()


@pytest.mark.parametrize(
    "names", [("a", "a.w"), ("a.w", "a"), ("", "."), ("a.b.c", "a", "a.b"), ("a.b", "a/b", "a..b")]
)
def test_inspect_shows_names_that_begin_other_names(run, tmp_path, names):
    save_file({name: torch.zeros(1 + number) for number, name in enumerate(names)}, tmp_path / "model.safetensors")
    code, out, _ = run("inspect", tmp_path / "model.safetensors")
    assert code == 0
    for number, name in enumerate(names):
        line = f"{name.rpartition('.')[2]}  {1 + number}  float32  {4 + 4 * number} B"
        assert sum(shown.lstrip("│├└─ ") == line.lstrip() for shown in out.splitlines()) == 1, out


def test_inspect_reads_headers_and_loads_no_framework(tiny_torch):
    command = [sys.executable, "-X", "importtime", "-m", "easytorch", "inspect", str(tiny_torch)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    imported = {line.split("|")[2].strip() for line in ended.stderr.splitlines() if line.count("|") == 2}
    assert "numpy" in imported and not imported & {
        "torch",
        "transformers",
        "jax",
        "tensorstore",
        "safetensors",
        "pydantic",
    }
