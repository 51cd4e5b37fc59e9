"""A destination is there whole or not at all, whatever ends the writer."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from easytorch.bridge.convert import convert
from easytorch.bridge.diff import diff
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.jobs import targets, writer
from easytorch.bridge.storage import exchange, staging_folder
from easytorch.bridge.storage.atomic import new_file, new_folder, staged

ROOT = Path(__file__).resolve().parents[3]
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
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=600)
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


def test_an_interruption_is_one_whatever_a_library_makes_of_it(tmp_path):
    """torch.save raises a RuntimeError of its own where Ctrl-C comes while it writes."""
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "new", key={"a": 1}, resume=True) as staging:
        (staging.folder / "one").write_text("1")
        staging.journal.finish(["one"])
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")
    with staged(tmp_path / "new", key={"a": 1}, resume=True) as staging:
        assert staging.journal.finished == {"one"}


def test_what_was_met_before_is_no_cause(tmp_path):
    """As where Ctrl-C makes a program save what it has."""
    for before in (KeyboardInterrupt("before"), OSError(5, "before")):
        try:
            raise before
        except (KeyboardInterrupt, OSError):
            with pytest.raises(ValueError, match="mine"), new_folder(tmp_path / "new"):
                raise ValueError("mine") from None
            with pytest.raises(CheckpointError, match="No space left"), new_folder(tmp_path / "new"):
                raise OSError(28, "No space left on device") from None


@pytest.mark.parametrize("where", ["_locked", "StagingFolder"])
def test_ctrl_c_while_the_hidden_folder_is_made(tmp_path, monkeypatch, where):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(staging_folder, where, interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "not" / "there"):
        pytest.fail("the block ran")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_hidden_folder_is_removed(tmp_path, monkeypatch):
    rmtree, calls = shutil.rmtree, []

    def interrupted(*arguments, **named):
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        rmtree(*arguments, **named)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "new"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("own", [True, False], ids=["renameat2", "rename"])
def test_a_rename_overwrites_nothing(own, tmp_path, monkeypatch):
    if not own:
        monkeypatch.setattr(exchange, "_renameat2", lambda *arguments: False)
    (tmp_path / "source").write_text("new")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            exchange.rename_new(tmp_path / "source", tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "link").is_symlink()
    with pytest.raises(FileNotFoundError):
        exchange.rename_new(tmp_path / "none", tmp_path / "other")
    exchange.rename_new(tmp_path / "source", tmp_path / "other")
    assert (tmp_path / "other").read_text() == "new"


def test_an_exchange_that_fails_is_an_error(tmp_path):
    """And no file system that has none: the caller would then rename twice."""
    (tmp_path / "one").write_text("1")
    (tmp_path / "two").write_text("2")
    if not exchange.exchange(tmp_path / "one", tmp_path / "two"):
        pytest.skip("no renameat2 here")
    assert (tmp_path / "one").read_text() == "2"
    with pytest.raises(FileNotFoundError):
        exchange.exchange(tmp_path / "one", tmp_path / "none")


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


def leftovers(folder):
    return sorted(file.name for file in folder.iterdir() if file.name.endswith(".partial"))


def kill_while(code, destination):
    """Runs `code`, in which `d` is the destination, in a process that ends there and then, as by SIGKILL."""
    begin = "import os, sys; from pathlib import Path; from easytorch.bridge.storage.atomic import *\n"
    begin += "d = Path(sys.argv[1])\n"
    command = [sys.executable, "-c", begin + code, str(destination)]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=600)
    assert ended.returncode == 9


FINISH_ONE = """
with staged(d, key={"source": 1, "options": "x"}) as staging:
    (staging.folder / "one").write_text("1")
    staging.journal.finish(["one"])
    (staging.folder / "nested").mkdir()
    (staging.folder / "nested" / "two").write_text("2")
    staging.journal.finish(["nested/two"])
    (staging.folder / "nested" / "half").write_text("torn")
    (staging.folder / "half").write_text("torn")
    os._exit(9)
"""


def test_a_killed_run_is_swept_at_the_next(tmp_path):
    destination = tmp_path / "new"
    kill_while(FINISH_ONE, destination)
    (tmp_path / ".other.00000000.partial").mkdir()
    (left,) = set(leftovers(tmp_path)) - {".other.00000000.partial"}
    with staged(destination) as staging:
        (staging.folder / "x").write_text("1")
    assert [left in note for note in staging.notes] == [True]
    assert leftovers(tmp_path) == [".other.00000000.partial"]
    assert [file.name for file in destination.iterdir()] == ["x"]


def test_a_living_run_is_left_alone(tmp_path):
    with new_folder(tmp_path / "new") as first:
        (first / "x").write_text("first")
        with pytest.raises(CheckpointError, match="exists already"), new_folder(tmp_path / "new") as second:
            assert first.is_dir()
            assert first != second
            (tmp_path / "new").mkdir()
        assert first.is_dir()
        (tmp_path / "new").rmdir()
    assert (tmp_path / "new" / "x").read_text() == "first"
    assert leftovers(tmp_path) == []


def test_a_run_goes_on_from_what_a_killed_one_finished(tmp_path):
    destination = tmp_path / "new"
    kill_while(FINISH_ONE, destination)
    (left,) = leftovers(tmp_path)
    journal = tmp_path / left / "journal"
    journal.write_text(journal.read_text() + '{"file": "half", "st')
    with staged(destination, key={"source": 1, "options": "x"}, resume=True) as staging:
        assert staging.journal.finished == {"one", "nested/two"}
        assert sorted(str(file.relative_to(staging.folder)) for file in staging.folder.rglob("*")) == [
            "nested",
            "nested/two",
            "one",
        ]
        staging.journal.finish(["one"])
    assert "resumed; " in staging.notes[0]
    assert (destination / "nested" / "two").read_text() == "2"
    assert leftovers(tmp_path) == []


def test_what_was_changed_since_is_not_finished(tmp_path):
    kill_while(FINISH_ONE, tmp_path / "new")
    (left,) = leftovers(tmp_path)
    changed = tmp_path / left / "new" / "new" / "one"
    changed.write_text("7")
    os.utime(changed, (1, 1))  # whatever the clock's steps are
    with staged(tmp_path / "new", key={"source": 1, "options": "x"}, resume=True) as staging:
        assert staging.journal.finished == {"nested/two"}
        assert not (staging.folder / "one").exists()


@pytest.mark.parametrize("journal", ["", "null\n", '{"key": 3}\n', '{"file": "one", "state": []}\n', "[" * 9999 + "\n"])
def test_a_journal_of_something_else_is_not_gone_on_from(tmp_path, journal):
    for spoil in (False, True):
        kill_while(FINISH_ONE, tmp_path / "new")
        (left,) = leftovers(tmp_path)
        if spoil:
            (tmp_path / left / "journal").write_text(journal)
        try:
            with staged(tmp_path / "new", key={"source": 2, "options": "x"}, resume=True) as staging:
                assert staging.journal.finished == set()
                assert list(staging.folder.iterdir()) == []
                raise KeyError
        except KeyError:
            assert leftovers(tmp_path) == []
        (note,) = staging.notes
        assert ("another source left it, so nothing is resumed" in note) == (not spoil)


def test_an_interruption_keeps_what_is_finished_only_for_resume(tmp_path):
    for resume, interruption, kept in [(True, KeyboardInterrupt, 1), (True, OSError, 0), (False, SystemExit, 0)]:
        parent = tmp_path / interruption.__name__
        with (
            pytest.raises((CheckpointError, KeyboardInterrupt, SystemExit)),
            staged(parent / "new", key={"source": 1}, resume=resume) as staging,
        ):
            (staging.folder / "one").write_text("1")
            staging.journal.finish(["one"])
            raise interruption("stop")
        assert parent.exists() == kept
        assert not kept or len(leftovers(parent)) == 1


@pytest.fixture(params=[True, False], ids=["exchange", "no_exchange"])
def rename_flags(request, monkeypatch):
    """With renameat2's flags, and on a file system that has none."""
    if not request.param:
        monkeypatch.setattr(exchange, "_renameat2", lambda *arguments: False)


@pytest.mark.usefixtures("rename_flags")
def test_replacing(tmp_path):
    for text in ("old", "new"):
        with new_folder(tmp_path / "folder", replace=True) as folder:
            (folder / "x").write_text(text)
        with new_file(tmp_path / "file", "y", replace=True) as folder:
            (folder / "y").write_text(text)
    assert (tmp_path / "folder" / "x").read_text() == (tmp_path / "file").read_text() == "new"
    with pytest.raises(CheckpointError, match="exists already"), new_folder(tmp_path / "file", replace=True):
        pass
    with pytest.raises(CheckpointError, match="exists already"), new_file(tmp_path / "file", "y") as folder:
        pytest.fail("the block ran")
    with pytest.raises(CheckpointError, match="exists already"), new_file(tmp_path / "late", "y") as folder:
        (folder / "y").write_text("mine")
        (tmp_path / "late").write_text("another writer was faster")
    assert (tmp_path / "late").read_text() == "another writer was faster"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder", "late"]


def test_killed_between_the_two_renames_without_exchange(tmp_path):
    with new_folder(tmp_path / "new") as folder:
        (folder / "x").write_text("old")
    code = """
from easytorch.bridge.storage import atomic
def die(one, other):
    partial = one.parents[1]
    (partial / "old").mkdir()
    other.rename(partial / "old" / other.name)
    os._exit(9)
atomic.exchange = die
with new_folder(d, replace=True) as folder:
    (folder / "x").write_text("new")
"""
    kill_while(code, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointError, match="exists already"), new_folder(tmp_path / "new"):
        pytest.fail("the block ran")
    assert (tmp_path / "new" / "x").read_text() == "new"
    assert leftovers(tmp_path) == []


def test_finished_files_are_not_written_again(tiny_flax, tmp_path, monkeypatch):
    format_ = targets.target("flax").format
    written: list[str] = []
    write = type(format_).write

    def spy(self, folder, file, tensors, source):
        written.append(file)
        if len(written) == 4:
            raise KeyboardInterrupt
        write(self, folder, file, tensors, source)

    def awaited(*given):
        """A file is finished before the next is begun, and not whenever its thread is given a processor."""
        future = next_sync(*given)
        future.result()
        return future

    next_sync = writer._next_sync
    monkeypatch.setattr(writer, "_next_sync", awaited)
    monkeypatch.setattr(type(format_), "write", spy)
    options = {"to": "flax", "max_shard_size": "1KB", "resume": True}
    with pytest.raises(KeyboardInterrupt):
        convert(tiny_flax, tmp_path / "new", **options)
    (left,) = leftovers(tmp_path)
    lines = (tmp_path / left / "journal").read_text().splitlines()
    finished = {line["file"] for line in map(json.loads, lines) if "file" in line}
    assert finished == set(written[:3])
    convert(tiny_flax, tmp_path / "new", **options)
    assert finished.isdisjoint(written[4:])
    assert diff(tiny_flax, tmp_path / "new").same
