"""Power loss: every prefix of what a conversion asked the disk for, with any of what it had not synced lost.

Writes, syncs and renames are recorded as they are called. A file's bytes are certain from its fsync on, a folder's
entries from the fsync of the folder on; until then each may be there, torn or not. What a reader may find at the
destination after any of that is nothing, or all of it.
"""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from easytorch.bridge.convert import convert
from easytorch.bridge.storage import atomic, journal
from easytorch.bridge.storage import exchange as renames
from easytorch.bridge.storage import fsync as disk
from easytorch.bridge.storage.atomic import staged

SEED = 20260719


class Recording:
    """The calls in their order: (name, path), and after each what the staging folders held by then."""

    def __init__(self, parent, monkeypatch):
        self.parent = parent
        self.calls = []
        self._number = 0
        sync, rename, exchange = os.fsync, renames.rename_new, renames.exchange

        def fsync(descriptor):
            sync(descriptor)
            self.note("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")))

        def renamed(source, target):
            self.note("before", target)
            rename(source, target)
            self.note("rename", target)

        def exchanged(one, other):
            done = exchange(one, other)
            self.note("exchange", other)
            return done

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(atomic, "rename_new", renamed)
        monkeypatch.setattr(atomic, "exchange", exchanged)
        # One sync for many files tells nothing of errors; the order is that of the files' own.
        monkeypatch.setattr(disk, "_sync_file_system", lambda path: None)

    def note(self, name, path):
        found = {
            file.relative_to(self.parent): (file.read_bytes(), file.stat().st_mtime_ns)
            for file in self.parent.rglob("*")
            if file.is_file()
        }
        self.calls.append((name, path, found))

    def order(self, name, path):
        return [number for number, (call, where, _) in enumerate(self.calls) if (call, where) == (name, path)]


@pytest.fixture
def parent(tmp_path):
    (tmp_path / "parent").mkdir()
    return tmp_path / "parent"


@pytest.mark.parametrize("to", ["torch", "flax-safetensors", "flax"])
def test_all_is_on_disk_before_its_name_is(tiny_flax, parent, monkeypatch, to):
    source = shutil.copytree(tiny_flax, tiny_flax.parent / "source")
    destination = parent / "new"
    recording = Recording(parent, monkeypatch)
    convert(source, destination, to=to, max_shard_size="2KB")
    (renamed,) = recording.order("rename", destination)
    synced = {path for name, path, _ in recording.calls[:renamed] if name == "fsync"}
    staging = next(path for path in synced if path.name.endswith(".partial")) / "new" / "new"
    written = {file.name for file in destination.iterdir()}
    assert len(written) > 5
    assert {path.name for path in synced if path.parent == staging} >= written
    # The folder with their names, and then the one with the folder's name.
    assert staging in synced
    last = {name: max(recording.order("fsync", staging / name)) for name in written}
    assert max(recording.order("fsync", staging)) > max(last.values()), "a file was synced after its folder"
    assert recording.order("fsync", parent)[-1] > renamed
    # What was synced is what stands there.
    for name in written:
        at = recording.calls[last[name]][2]
        (content,) = [content for file, (content, _) in at.items() if file.name == name]
        assert content == (destination / name).read_bytes()


def test_a_file_is_called_finished_after_it_is_on_disk(tiny_flax, parent, monkeypatch):
    recording = Recording(parent, monkeypatch)
    convert(tiny_flax, parent / "new", to="torch", max_shard_size="2KB")
    seen = set()
    journals = 0
    for name, path, found in recording.calls:
        if name != "fsync":
            continue
        if path.name in ("journal", "journal.new"):
            journals += 1
            (content,) = [content for file, (content, _) in found.items() if file.name == path.name]
            lines = [json.loads(line) for line in content.split(b"\n")[:-1]]
            assert {line["file"] for line in lines if "file" in line} <= seen, "called finished and not on disk"
        seen.add(path.name)
    assert journals > 2
    # The journal's own name: it stands beside the unfinished destination before anything is written there.
    first = next(number for number, (_, path, _) in enumerate(recording.calls) if path.name == "journal.new")
    assert recording.calls[first + 1][1].name.endswith(".partial")


def lost(found, certain, rng):
    """What may be there after the power went: what is certain, and of the rest all, a part, zeros or nothing.

    Sizes and times may be on disk long before the bytes are.
    """
    left = {}
    for file, (content, time) in found.items():
        fate = 0 if certain.get(file) == content else rng.randrange(4)
        if fate < 3:
            left[file] = (content, content[: rng.randrange(len(content) + 1)], bytes(len(content)))[fate], time
    return left


@pytest.mark.parametrize("to", ["torch", "flax"])
def test_power_may_go_at_any_moment(tiny_flax, tiny_torch, parent, tmp_path, monkeypatch, to):
    source = tiny_flax if to == "torch" else tiny_torch
    destination = parent / "new"
    with monkeypatch.context() as patched:
        recording = Recording(parent, patched)
        convert(source, destination, to=to, max_shard_size="2KB", resume=True)
    expected = {file.name: file.read_bytes() for file in destination.iterdir()}
    rng = random.Random(f"{SEED} {to}")
    certain = {}
    resumed = whole = 0
    moments = list(enumerate(recording.calls))
    chosen = set(rng.sample(range(len(moments)), min(len(moments), 25))) | {len(moments) - 1}
    for number, (name, path, found) in moments:
        if name == "fsync" and path.is_relative_to(parent):
            file = path.relative_to(parent)
            certain |= {file: found[file][0]} if file in found else {}
        if name == "rename":
            # The files were synced under their former name.
            staging = {file.name: content for file, content in certain.items()}
            certain |= {file: staging[file.name] for file in found if file.parts[0] == "new" and file.name in staging}
        if number not in chosen:
            continue
        world = tmp_path / f"world-{number}"
        world.mkdir()
        for file, (content, time) in lost(found, certain, rng).items():
            target = world / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            os.utime(target, ns=(time, time))
        if (world / "new").exists():
            whole += 1
            assert {file.name: file.read_bytes() for file in (world / "new").iterdir()} == expected, f"seed {SEED}"
        report = convert(source, world / "new", to=to, max_shard_size="2KB", resume=True)
        resumed += any("resumed; " in note for note in report.notes)
        assert {file.name: file.read_bytes() for file in (world / "new").iterdir()} == expected, f"seed {SEED} {number}"
        assert [file.name for file in world.iterdir()] == ["new"]
    assert resumed >= 3 and whole >= 1


def test_a_file_torn_after_it_was_called_finished_is_written_again(parent):
    with pytest.raises(KeyboardInterrupt), staged(parent / "new", key={"a": 1}, resume=True) as staging:
        for name in ("one", "two"):
            (staging.folder / name).write_text(name)
        staging.journal.finish(["one", "two"])
        torn = staging.folder / "two"
        raise KeyboardInterrupt
    torn.write_text("to")
    with staged(parent / "new", key={"a": 1}, resume=True) as staging:
        assert staging.journal.finished == {"one"}


def test_a_folder_that_is_replaced_leaves_no_journal_to_go_on_from(parent, monkeypatch):
    with staged(parent / "new") as staging:
        (staging.folder / "x").write_text("old")
        # As the new one will be in all that a journal states.
        os.utime(staging.folder / "x", (1, 1))
    exchange = atomic.exchange

    def killed(one, other):
        exchange(one, other)
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "exchange", killed)
    with pytest.raises(KeyboardInterrupt), staged(parent / "new", replace=True, key={"a": 1}, resume=True) as staging:
        (staging.folder / "x").write_text("new")
        os.utime(staging.folder / "x", (1, 1))
        staging.journal.finish(["x"])
    monkeypatch.undo()
    assert (parent / "new" / "x").read_text() == "new"
    # What is left holds the old folder: a run with the same key must not take its files for its own.
    with staged(parent / "new", replace=True, key={"a": 1}, resume=True) as staging:
        assert staging.journal.finished == set()
        assert list(staging.folder.iterdir()) == []
        (staging.folder / "x").write_text("newer")
    assert (parent / "new" / "x").read_text() == "newer"
    assert sorted(file.name for file in parent.iterdir()) == ["new"]


def test_what_cannot_be_synced_is_an_error(tiny_flax, parent, monkeypatch):
    from easytorch.bridge.errors import CheckpointError

    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        convert(tiny_flax, parent / "new", to="torch")
    assert list(parent.iterdir()) == []
    assert journal.flush is disk.flush
