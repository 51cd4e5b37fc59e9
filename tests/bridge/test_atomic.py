"""A destination is there whole or not at all, whatever ends the writer."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from easytorch.bridge.atomic import new_folder
from easytorch.bridge.convert import convert
from easytorch.bridge.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
# Rewrites the Flax checkpoint argv[1] in small shards as argv[2] and kills itself when argv[3] tensors are written.
KILLED = """
import os, signal, sys
from easytorch.bridge.convert import convert
written = []
def progress(name, done, total):
    written.append(name)
    if len(written) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], to="flax", max_shard_size="1KB", progress=progress)
"""


@pytest.mark.parametrize("written", [1, 20, 41])
def test_killed_while_writing(tiny_flax, tmp_path, written):
    destination = tmp_path / "new"
    command = [sys.executable, "-c", KILLED, str(tiny_flax), str(destination), str(written)]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert not destination.exists()
    convert(tiny_flax, destination, to="torch", verify=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, CheckpointError])
def test_interrupted_while_writing(tiny_flax, tmp_path, error):
    def progress(name, done, total):
        raise error("stop")

    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError if error is OSError else error):
        convert(tiny_flax, tmp_path / "not" / "there" / "yet", to="torch", progress=progress)
    assert sorted(tmp_path.iterdir()) == before


def test_existing_destinations_are_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    for name in ("file", "link", "empty"):
        with pytest.raises(CheckpointError, match=f"{name}: exists already"), new_folder(tmp_path / name):
            pytest.fail("the block ran")
    with pytest.raises(CheckpointError, match="exists already"), new_folder(tmp_path / "late"):
        (tmp_path / "late").write_text("another writer was faster")
    assert (tmp_path / "late").read_text() == "another writer was faster"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "file", "late", "link"]


def test_parents_are_made_and_permissions_are_ordinary(tmp_path):
    with new_folder(tmp_path / "a" / "b") as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "a" / "b").exists()
    (tmp_path / "ordinary").mkdir()
    assert (tmp_path / "a" / "b").stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    (tmp_path / "file").write_text("")
    for nowhere in (tmp_path / "file" / "b", tmp_path / "c" / ("long" * 100)):
        with pytest.raises(CheckpointError, match="cannot be written"), new_folder(nowhere):
            pytest.fail("the block ran")
    assert not (tmp_path / "c").exists()
