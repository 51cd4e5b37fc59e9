"""What waits for its turn lies on disk: on the destination's, or where TMPDIR says, and a full one is one error."""

import io
import tempfile
from pathlib import Path

import numpy as np
import pytest

from easytorch.bridge.core.mapped import MappedFile
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.storage.temp_arrays import TempArrays


@pytest.fixture
def no_tmpdir(monkeypatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)


def mapped_from(folder: Path) -> bool:
    return any(f" {folder}/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_it_lies_in_the_folder_and_is_gone_with_the_array(tmp_path, no_tmpdir) -> None:
    array = np.arange(1 << 16, dtype=np.float32).reshape(256, 256).T
    kept = TempArrays(tmp_path).put_aside(array)
    assert np.array_equal(kept, array) and mapped_from(tmp_path) and not list(tmp_path.iterdir())
    del kept
    assert not mapped_from(tmp_path)


def test_a_folder_that_is_asked_for_comes_first(tmp_path, monkeypatch) -> None:
    (asked := tmp_path / "asked").mkdir()
    monkeypatch.setenv("TMPDIR", str(asked))
    monkeypatch.setattr(tempfile, "tempdir", None)
    kept = TempArrays(tmp_path / "not there").put_aside(np.ones(1 << 16))
    assert kept.sum() == 1 << 16 and mapped_from(asked)


def test_small_arrays_stay_where_they_are(tmp_path) -> None:
    array = np.ones(3)
    assert TempArrays(tmp_path / "not there").put_aside(array) is array


def test_what_stands_in_a_file_stays_there(tmp_path, no_tmpdir) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    mapped = MappedFile(tmp_path / "file", writable=True).array(0, (512, 512), "float32")
    for view in (mapped, mapped.T[3:]):
        assert TempArrays(tmp_path / "not there").put_aside(view) is view
    assert TempArrays(tmp_path).put_aside(kept := TempArrays(tmp_path).put_aside(np.ones(1 << 16))) is kept


def test_memory_that_is_not_numpys_is_no_file(tmp_path, no_tmpdir) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    store = tensorstore.array(np.ones((256, 512), np.float32))
    array = store[:, 1:].read().result()
    assert TempArrays(tmp_path).put_aside(array) is not array


def test_a_full_disk_is_one_error(tmp_path, no_tmpdir, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: io.FileIO("/dev/full", "r+"))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*no room to put 524288 bytes aside.*TMPDIR"):
        TempArrays(tmp_path).put_aside(np.ones(1 << 16))
