"""`--rules table.py`: errors of the file are said with its place, `--resume` knows the table again, `--drop` and `diff`
go by it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from easytorch.bridge import convert, diff
from easytorch.bridge.core.nested import nested
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.rules.user_file import read_rules
from easytorch.bridge.save_tree import save_tree
from easytorch.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
SEED = 20261122
HEAD = """from easytorch.bridge.transforms import Transform
SCALE = 2.0
def change(arrays):
    return helper(arrays[0])
def helper(array):
    return array * SCALE
"""
# A layout of one's own; each test spoils a function of it.
OWN = {
    "to_flax": "change",
    "to_torch": "lambda array: (array / SCALE,)",
    "flax_shape": "lambda shapes: shapes[0]",
    "torch_shapes": "lambda shape: (shape,)",
}


def written(folder: Path, *, head: str = HEAD, name: str = "table.py", **changes: str) -> Path:
    """A table in a file: a matrix by a layout of its own, a bias and a counter that trees have no place for."""
    own = ", ".join(f"{key}={value}" for key, value in {**OWN, **changes}.items())
    rows = "('w', 'w/kernel', OWN), ('b', 'b/bias', 'identity'), ('count', None, 'buffer')"
    file = folder / name
    file.write_text(f"{head}OWN = Transform(name='own', {own})\nRULES = ({rows})\n")
    return file


@pytest.fixture
def sides(tmp_path):
    """The same weights as torch's and as a tree, with one more leaf; no config beside either."""
    rng = np.random.default_rng(SEED)
    state = {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}
    save_file({**state, "count": np.array(7)}, tmp_path / "torch.safetensors", metadata={"format": "pt"})
    leaves = {"w/kernel": state["w"] * 2, "b/bias": state["b"], "old/kernel": state["b"]}
    save_tree(nested(leaves), tmp_path / "tree", config=None)
    return tmp_path / "torch.safetensors", tmp_path / "tree"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import json\nx = [1]\nRULES = (x[3],)\n", r"t\.py, line 3: IndexError: list index out of range"),
        ("def f():\n    raise KeyError('k')\n\nf()\n", r"t\.py, line 2: KeyError: 'k'"),
        ("import nothing_of_this_name\n", r"t\.py, line 1: ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit(0)\n", r"t\.py, line 2: SystemExit: 0"),
        ("RULES = ((1, 2),)\n", r"t\.py: rule 0 is \(1, 2\)"),
        ("RULES = (('a', 'b', 'lineer'),)\n", r"t\.py: no transform is called 'lineer'"),
        ("RULES = (('a', 'x', 'linear'), ('a', 'y', 'linear'))\n", r"t\.py: ambiguous table"),
        ("RULES = (('a.{i', 'x', 'linear'),)\n", r"t\.py: pattern"),
        ("RULES = 3\n", r"t\.py: does not set RULES"),
    ],
)
def test_errors_of_the_file_are_said_with_its_place(tmp_path, capsys, text, message):
    (tmp_path / "t.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rules(tmp_path / "t.py")
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path), str(tmp_path / "new"), "--to", "torch", "--rules", str(tmp_path / "t.py")])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in printed, printed
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("to", "changes", "message"),
    [
        ("flax", {"to_flax": "lambda arrays: arrays[3]"}, r"table\.py, line 7: the layout 'own' fails: IndexError"),
        ("flax", {"flax_shape": "lambda shapes: 1 / 0"}, r"line 7: the layout 'own' fails: ZeroDivisionError"),
        ("flax", {"flax_shape": "lambda shapes: 3"}, r"'own' gives 1 of them where a tuple of 1 shape is wanted"),
        ("flax", {"to_flax": "lambda arrays: None"}, r"'own' gives 1 of them where a tuple of 1 array is wanted"),
        ("flax", {"to_flax": "lambda arrays: arrays[0].T"}, r"announced as float32 \(3, 2\), and float32 \(2, 3\)"),
        ("torch", {"to_torch": "lambda array: array.reshape(7)"}, r"'own' fails: ValueError: cannot reshape"),
        ("torch", {"to_torch": "lambda array: array"}, r"gives a ndarray where a tuple of 1 array is wanted"),
        ("torch", {"to_torch": "lambda array: (array, array)"}, r"gives 2 of them where a tuple of 1 array"),
        ("torch", {"torch_shapes": "lambda shape: shape"}, r"gives 2 of them where a tuple of 1 shape is wanted"),
        ("torch", {"torch_shapes": "lambda shape: undefined"}, r"fails: NameError: name 'undefined'"),
    ],
)
def test_errors_of_layouts_are_said_with_their_place(sides, tmp_path, to, changes, message):
    source = sides[to == "torch"]
    drop = ["old/*"] if to == "torch" else []
    before = sorted(tmp_path.iterdir())
    table = written(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "new", to=to, rules=table, drop=drop)
    assert sorted(tmp_path.iterdir()) == sorted([*before, table])


def test_there_and_back_with_what_trees_have_no_place_for(sides, tmp_path):
    torch_side, _ = sides
    table = written(tmp_path)
    convert(torch_side, tmp_path / "there", to="orbax", rules=table)
    convert(tmp_path / "there", tmp_path / "back", to="torch", rules=str(table), verify=True)
    got, expected = load_file(tmp_path / "back/model.safetensors"), load_file(torch_side)
    assert got.keys() == expected.keys()
    assert all(np.array_equal(got[name], array) for name, array in expected.items())


def test_diff_goes_by_the_table(sides, tmp_path, capsys):
    torch_side, _ = sides
    table = written(tmp_path)
    convert(torch_side, tmp_path / "there", to="flax", rules=table)
    for one, other in ((torch_side, tmp_path / "there"), (tmp_path / "there", torch_side)):
        found = diff(one, other, rules=table)
        assert found.same and found.compared == 3
    convert(tmp_path / "there", tmp_path / "zarr", to="orbax-zarr")
    assert diff(tmp_path / "there", tmp_path / "zarr", rules=table).same
    changed = load_file(torch_side)
    changed["w"][1, 1] += 1
    save_file(changed, tmp_path / "changed.safetensors", metadata={"format": "pt"})
    arguments = [str(tmp_path / "changed.safetensors"), str(tmp_path / "there"), "--rules", str(table), "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["diff", *arguments])
    assert ended.value.code == 1
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["differing"]] == ["w"]
    with pytest.raises(ValueError, match="both checkpoints are torch's"):
        diff(torch_side, torch_side, rules=table)


def test_what_is_dropped_need_not_be_there(sides, tmp_path):
    """A leaf, or a tensor, that the table has a row for: the row's other side goes without it."""
    torch_side, tree = sides
    table = written(tmp_path)
    convert(tree, tmp_path / "less", to="torch", rules=table, drop=["old/*", "b/bias"])
    assert set(load_file(tmp_path / "less/model.safetensors")) == {"w"}
    convert(torch_side, tmp_path / "less-tree", to="flax", rules=table, drop=["w"])
    with pytest.raises(CheckpointError, match="'w': is missing"):
        convert(tmp_path / "less-tree", tmp_path / "no", to="torch", rules=table)
    # The leaf of another tree than the one that is read is none of the model's.
    leaves = {"params/w/kernel": np.ones((3, 2), np.float32), "ema_params/b/bias": np.ones(3, np.float32)}
    save_tree(nested({**leaves, "opt_state/count": np.array(1)}), tmp_path / "state", config=None)
    with pytest.raises(CheckpointError, match="'b': is missing"):
        convert(tmp_path / "state", tmp_path / "no", to="torch", rules=table, drop=["ema_params/*"])
    save_tree(nested({**leaves, "params/b/bias": np.ones(3, np.float32)}), tmp_path / "states", config=None)
    convert(tmp_path / "states", tmp_path / "yes", to="torch", rules=table, drop=["params/b/*", "ema_params/*"])
    assert set(load_file(tmp_path / "yes/model.safetensors")) == {"w"}


# Prints the table's part of the key by which `--resume` knows a conversion again.
TOLD = """
import sys
from easytorch.bridge.rules.fingerprint import fingerprint
from easytorch.bridge.rules.user_file import read_rules
from easytorch.bridge.layouts import attention, gru, lstm, dense_general, einsum, nnx_lstm
for path in sys.argv[1:]:
    print(fingerprint(read_rules(path)))
print(fingerprint((*attention("a", "a", heads=2), *gru("g", "g"), *lstm("l", "l"), *nnx_lstm("n", "n"),
      ("d", "d", dense_general(inputs=(2, 3), outputs=(4,))), ("e", "e", einsum("BTD,DNH->BTNH", (4, 2, 3))))))
"""


def test_resume_knows_a_table_again(tmp_path):
    """In another process, at other addresses; and not where any function of it, or what that reads, is another."""
    same = [written(tmp_path), written(tmp_path, name="moved.py", head=f"\n# moved\n{HEAD}")]
    other = [
        written(tmp_path, name="a.py", head=HEAD.replace("SCALE = 2.0", "SCALE = 4.0")),
        written(tmp_path, name="b.py", head=HEAD.replace("array * SCALE", "array + SCALE")),
        written(tmp_path, name="c.py", to_torch="lambda array: (array / SCALE / 1,)"),
        written(tmp_path, name="d.py", rank="2"),
        written(tmp_path, name="e.py", to_flax="(lambda by: lambda arrays: arrays[0] * by)(2.0)"),
        written(tmp_path, name="f.py", to_flax="(lambda by: lambda arrays: arrays[0] * by)(3.0)"),
    ]
    command = [sys.executable, "-c", TOLD, *map(str, (*same, *other))]
    told = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600).stdout
        for _ in range(2)
    ]
    assert told[0] == told[1]
    lines = told[0].split()
    assert lines[0] == lines[1] and len(set(lines)) == len(lines) - 1


# Converts by a table of functions and ends itself, as by SIGKILL, when the second file is to be written.
KILLED = """
import os, sys
from easytorch.bridge import convert
from easytorch.bridge.jobs import targets
format_ = type(targets.target("flax").format)
write, files = format_.write, []
def one_file(self, folder, file, tensors, source):
    files.append(file)
    if len(files) == 3:
        os._exit(9)
    write(self, folder, file, tensors, source)
format_.write = one_file
from easytorch.bridge.jobs import writer
_next = writer._next_sync
writer._next_sync = lambda *given: (lambda future: (future.result(), future)[1])(_next(*given))
convert(sys.argv[1], sys.argv[2], to="flax", rules=sys.argv[3], max_shard_size="20", resume=True)
"""


@pytest.mark.parametrize("another", [False, True])
def test_resume_by_a_table(tmp_path, another):
    table = written(tmp_path)
    arrays = {f"w{number}": np.full((3, 2), number, np.float32) for number in range(5)}
    save_file(arrays, tmp_path / "many.safetensors", metadata={"format": "pt"})
    table.write_text(
        table.read_text()
        .replace("('w', 'w/kernel', OWN)", "('{w}', '{w}/kernel', OWN)")
        .replace("('b', 'b/bias', 'identity'), ", "")
    )
    command = [sys.executable, "-c", KILLED, str(tmp_path / "many.safetensors"), str(tmp_path / "new"), str(table)]
    assert subprocess.run(command, cwd=ROOT, timeout=600).returncode == 9
    if another:
        table.write_text(table.read_text().replace("SCALE = 2.0", "SCALE = 4.0"))
    options = {"to": "flax", "rules": table, "max_shard_size": "20"}
    report = convert(tmp_path / "many.safetensors", tmp_path / "new", resume=True, **options)
    assert any(("with another rules" if another else "resumed; ") in note for note in report.notes), report.notes
    convert(tmp_path / "many.safetensors", tmp_path / "once", **options)
    names = sorted(file.name for file in (tmp_path / "once").iterdir())
    assert len(names) == 6 and sorted(file.name for file in (tmp_path / "new").iterdir()) == names
    assert all((tmp_path / "new" / name).read_bytes() == (tmp_path / "once" / name).read_bytes() for name in names)
