"""What waits for its turn lies on disk: on the destination's, or where TMPDIR says, and a full one is one error."""

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.spool import Spool


@pytest.fixture
def no_tmpdir(monkeypatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def mapped_from(folder: Path) -> bool:
    return any(f" {folder}/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_it_lies_in_the_folder_and_is_gone_with_the_array(tmp_path, no_tmpdir) -> None:
    array = np.arange(1 << 16, dtype=np.float32).reshape(256, 256).T
    kept = Spool(tmp_path).put_aside(array)
    assert np.array_equal(kept, array) and mapped_from(tmp_path) and not list(tmp_path.iterdir())
    del kept
    assert not mapped_from(tmp_path)


def test_a_folder_that_is_asked_for_comes_first(tmp_path, monkeypatch) -> None:
    (asked := tmp_path / "asked").mkdir()
    monkeypatch.setenv("TMPDIR", str(asked))
    monkeypatch.setattr(tempfile, "tempdir", None)
    kept = Spool(tmp_path / "not there").put_aside(np.ones(1 << 16))
    assert kept.sum() == 1 << 16 and mapped_from(asked)


def test_small_arrays_stay_where_they_are(tmp_path) -> None:
    array = np.ones(3)
    assert Spool(tmp_path / "not there").put_aside(array) is array


def test_a_full_disk_is_one_error(tmp_path, no_tmpdir, monkeypatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*no room to put 524288 bytes aside.*TMPDIR"):
        Spool(tmp_path).put_aside(np.ones(1 << 16))
