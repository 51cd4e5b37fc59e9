"""tensorstore's errors, and those of the disk under it, as the bridge raises them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.tensorstore_arrays import array_spec, store_spec, tensorstore_errors

FILE = Path("run/checkpoint/params")
KINDS = (ValueError, KeyError, IndexError, OSError, RuntimeError, NotImplementedError, OverflowError)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_reading_names_file_and_tensor(kind):
    with pytest.raises(CheckpointError) as caught, tensorstore_errors(FILE, "layer/kernel"):
        raise kind("NOT_FOUND: chunk 3 is absent [source locations='a.cc']\nmore")
    said = str(caught.value)
    assert str(FILE) in said and "layer/kernel" in said and "cannot be read" in said and "copy the checkpoint" in said
    assert "chunk 3 is absent" in said and "source locations" not in said and "more" not in said
    assert isinstance(caught.value.__cause__, kind)


def test_an_error_without_words_is_named_by_its_kind_and_a_long_one_is_cut():
    with pytest.raises(CheckpointError, match=r"cannot be read \(RuntimeError\)"), tensorstore_errors(FILE):
        raise RuntimeError
    with pytest.raises(CheckpointError) as caught, tensorstore_errors(FILE):
        raise RuntimeError("x" * 5000)
    assert len(str(caught.value)) < 500


def test_an_error_of_writing_is_the_disks_where_it_is_one():
    with pytest.raises(OSError) as caught, tensorstore_errors(FILE, writing=True):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing [os_error_code='28']")
    assert caught.value.errno == errno.ENOSPC and not isinstance(caught.value, CheckpointError)
    written = pytest.raises(CheckpointError, match=r"cannot be written .*look at the disk")
    with written, tensorstore_errors(FILE, "a", writing=True):
        raise ValueError("no number")
    with pytest.raises(CheckpointError, match="cannot be read"), tensorstore_errors(FILE):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing [os_error_code='28']")


def test_what_is_an_error_of_ours_already_stays_itself_and_others_pass():
    ours = CheckpointError("its own words")
    with pytest.raises(CheckpointError) as caught, tensorstore_errors(FILE):
        raise ours
    assert caught.value is ours
    for kind in (KeyboardInterrupt, MemoryError, TypeError):
        with pytest.raises(kind), tensorstore_errors(FILE):
            raise kind


def test_what_is_opened_where(tmp_path):
    plain, tree = store_spec(tmp_path, ocdbt=False), store_spec(tmp_path, ocdbt=True)
    assert plain == {"driver": "file", "path": f"{tmp_path}/"}
    assert tree == {"driver": "ocdbt", "base": plain, "cache_pool": "cache_pool#ocdbt"}
    assert array_spec(plain, "a.b", "zarr") == {
        "driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/a.b/"},
    }  # fmt: skip
    assert array_spec(tree, "a", "zarr3")["kvstore"]["path"] == "a/" and "path" not in tree
