"""docs/bridge.md: its Python and its commands run as they stand, its table lists what `--to` takes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from easytorch.bridge.convert import convert
from easytorch.bridge.core.nested import nested
from easytorch.bridge.jobs.targets import TARGETS
from easytorch.bridge.save_tree import save_tree
from easytorch.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "bridge.md").read_text()
SESSIONS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)


def test_its_python_runs(tmp_path, monkeypatch) -> None:
    pytest.importorskip("flax")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained("from-torch")
    convert("from-torch", "gpt2-flax", to="flax")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    names: dict = {}
    for block in blocks:
        exec(compile(block, "docs/bridge.md", "exec"), names)


def run(command: str) -> int:
    """The exit code of a line of a console, in this process."""
    program, *words = shlex.split(command.removeprefix("$ "), comments=True)
    assert program == "easytorch"
    with pytest.raises(SystemExit) as exit_:
        main(words)
    return exit_.value.code


def written_runs(leaves: dict[str, np.ndarray], config: dict) -> None:
    """`run`, whose steps hold a training state of a Flax model, each with other numbers."""
    serialization = pytest.importorskip("flax.serialization")
    for step in (500, 1000, 1500):
        folder = Path("run", str(step))
        folder.mkdir(parents=True)
        params, ema = (nested({path: leaf + by for path, leaf in leaves.items()}) for by in (step, -step))
        state = {"params": params, "ema_params": ema, "step": np.array(step)}
        (folder / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize(state))
        (folder / "config.json").write_text(json.dumps(config))


def test_its_commands_run(tmp_path, monkeypatch, tiny_flax, tiny_leaves) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_flax.rename("bert-flax")
    written_runs(tiny_leaves, json.loads(Path("bert-flax/config.json").read_text()))
    mine = {"out/kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}
    save_tree(nested(mine), "mine")
    save_tree(nested({**mine, "old_head/kernel": np.zeros(2, np.float32)}), "trained")
    Path("table.py").write_text("RULES = [('out.weight', 'out/kernel', 'linear')]\n")
    first, rules, steps = ([line for line in session.splitlines() if line.startswith("$ ")] for session in SESSIONS)
    assert [run(command) for command in first] == [0, 0, 0]

    bias = "classifier.bias"
    for command, by in zip(steps, (1500, 1000, -1500), strict=True):
        assert run(command) == 0, command
        np.testing.assert_array_equal(load_file("model/model.safetensors")[bias], tiny_leaves["classifier/bias"] + by)
        shutil.rmtree("model")  # where the next of them writes

    assert [run(command) for command in rules] == [0, 0, 0]
    for made in ("mine-torch", "trained-torch"):
        found = load_file(f"{made}/model.safetensors")
        assert list(found) == ["out.weight"]
        np.testing.assert_array_equal(found["out.weight"], mine["out/kernel"].T)


def test_its_table_lists_every_target() -> None:
    table = PAGE[PAGE.index("| `--to` |") :].partition("\n\n")[0]
    first_column = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(first_column))) == sorted(TARGETS)
