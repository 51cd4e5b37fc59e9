"""Files written by several threads at once, and memory given back on the way."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easytorch.bridge.core import blocks
from easytorch.bridge.core.mapped import MappedFile, give_back, map_file
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import parallel_write
from easytorch.bridge.formats.parallel_write import Elements, write_parts

RNG = np.random.default_rng(0)


class Arrays:
    """A source that counts."""

    config = None

    def __init__(self, **arrays: np.ndarray) -> None:
        self.arrays = arrays
        self.written: list[str] = []
        self.infos = {name: TensorInfo(name, array.shape, array.dtype.name) for name, array in arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def wrote(self, info: TensorInfo) -> None:
        self.written.append(info.name)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(parallel_write, "_MOST_THREADS", request.param)
    monkeypatch.setattr(parallel_write, "_processors", lambda: request.param)
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(blocks, "_PLAIN_BYTES", 1000)
    return request.param


def test_parts_stand_in_their_order(tmp_path: Path, threads: int) -> None:
    source = Arrays(
        a=RNG.normal(size=(31, 57)).astype(np.float32).T,
        empty=np.empty((0, 4), np.int8),
        b=RNG.integers(0, 255, 12345).astype(np.uint8),
        scalar=np.array(3, np.int64),
    )
    inserts = {0: b"first", 700: b"7", 701: b"", 1766: b"last"}
    infos = source.infos
    write_parts(
        tmp_path / "file",
        [
            *(b"head", Elements(infos["a"], inserts), Elements(infos["empty"], {0: b"none"}), b""),
            *(Elements(infos["b"]), b"middle", Elements(infos["scalar"]), b"end"),
        ],
        source,
    )
    a = source.arrays["a"].tobytes()
    a = b"first" + a[:2800] + b"7" + a[2800:7064] + b"last" + a[7064:]
    expected = b"head" + a + b"none" + source.arrays["b"].tobytes() + b"middle" + (3).to_bytes(8, "little") + b"end"
    assert (tmp_path / "file").read_bytes() == expected
    assert sorted(source.written) == sorted(source.arrays)


def test_a_longer_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0" * 100)
    write_parts(tmp_path / "file", [b"new"], Arrays())
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_failure_in_any_thread_is_raised(tmp_path: Path, threads: int) -> None:
    source = Arrays(**{f"t{number}": np.ones(5000, np.uint8) for number in range(20)})

    def fail(info: TensorInfo) -> None:
        if info.name == "t7":
            raise OSError(28, "No space left on device")

    source.wrote = fail
    before = threading.active_count()
    with pytest.raises(OSError, match="No space left"):
        write_parts(tmp_path / "file", map(Elements, source.infos.values()), source)
    assert threading.active_count() == before


def test_no_thread_writes_on_when_ctrl_c_comes_at_the_end(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor is closed then, and its number may be another file's."""
    source = Arrays(**{f"t{number}": np.ones(5000, np.uint8) for number in range(20)})
    main, pwrite, go = threading.get_ident(), os.pwrite, threading.Event()
    held: list[int] = []

    def slow(*arguments: Any) -> int:
        if threading.get_ident() != main:
            held.append(1)
            go.wait(60)
            held.pop()
        return pwrite(*arguments)

    def interrupted(futures: Any) -> Any:
        if go.is_set():
            return usual(futures)
        go.set()
        raise KeyboardInterrupt

    def fail(info: TensorInfo) -> None:
        if threading.get_ident() == main:
            raise KeyboardInterrupt

    source.wrote = fail
    monkeypatch.setattr(os, "pwrite", slow)
    usual = concurrent.futures.wait
    monkeypatch.setattr(concurrent.futures, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_parts(tmp_path / "file", map(Elements, source.infos.values()), source)
    assert go.is_set() and not held


def test_what_was_not_announced_is_refused(tmp_path: Path, threads: int) -> None:
    with pytest.raises(CheckpointError, match="announced as float32"):
        write_parts(tmp_path / "file", [Elements(TensorInfo("a", (2, 3), "float32"))], Arrays(a=np.ones((3, 2), "f4")))


def _mapped_pages(file: Path) -> int:
    """Bytes of `file` that are mapped and present, by the kernel's own account."""
    found, count = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            found = line.endswith(str(file))
        elif found and line.startswith("Rss:"):
            count += int(line.split()[1]) << 10
    return count


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel does not say what is mapped")
def test_pages_of_a_mapped_file_are_given_back(tmp_path: Path) -> None:
    content = RNG.integers(0, 256, 3 << 20).astype(np.uint8)
    (tmp_path / "source").write_bytes(content.tobytes())
    with (tmp_path / "source").open("rb") as stream:
        mapped = map_file(stream.fileno())
    turned = np.frombuffer(mapped, np.uint16, 1 << 20, 1 << 20).reshape(1024, 1024).T
    source = Arrays(whole=np.frombuffer(mapped, np.uint8, 1 << 20), turned=turned)
    write_parts(tmp_path / "file", map(Elements, source.infos.values()), source)
    assert _mapped_pages(tmp_path / "source") <= 128 << 10
    assert (tmp_path / "file").read_bytes() == source.arrays["whole"].tobytes() + source.arrays["turned"].tobytes()
    assert _mapped_pages(tmp_path / "source") >= 2 << 20
    give_back(source.arrays["turned"])
    assert _mapped_pages(tmp_path / "source") <= (1 << 20) + (128 << 10)
    assert np.array_equal(source.arrays["whole"], content[: 1 << 20])


def test_what_is_no_map_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"\1" * 100_000)
    own = MappedFile(tmp_path / "source", writable=True).array(0, (100_000,), "uint8")
    own[:] = 2
    give_back(own)
    assert (own == 2).all()
    give_back(np.ones(100_000))


def test_a_write_that_takes_a_part_is_gone_on_with(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: pwrite(file, data[: max(1, len(data) // 3)], place))
    source = Arrays(a=RNG.integers(0, 255, 5000).astype(np.uint8))
    write_parts(tmp_path / "file", [b"head", Elements(source.infos["a"])], source)
    assert (tmp_path / "file").read_bytes() == b"head" + source.arrays["a"].tobytes()
