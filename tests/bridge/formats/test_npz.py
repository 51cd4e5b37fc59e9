"""npz files: numpy's own, ours read by numpy, and those that lie."""

import io
import os
import struct
import tracemalloc
import warnings
import zipfile

import ml_dtypes
import numpy as np
import pytest

from easytorch.bridge.core.array_source import ArraySource
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.numpy_files.npy_header import HEADER_BYTES, read_npy_header
from easytorch.bridge.formats.numpy_files.npz import Npz

RNG = np.random.default_rng(0)
ARRAYS = {
    "params/img/kernel": RNG.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
    "transposed": RNG.standard_normal((4, 3)).astype(np.float32).T,
    "half": np.array([-0.0, np.inf, np.nan], np.float16),
    "count": np.array(7, np.int64),
    "mask": np.array([[True], [False]]),
    "complex": np.ones(3, np.complex64),
    "none": np.zeros((0, 3), np.float32),
    "large": RNG.standard_normal((300, 1000)),
}


def written(folder, arrays):
    infos = [TensorInfo(name, array.shape, array.dtype.name) for name, array in arrays.items()]
    format_ = Npz()
    for file, group in format_.layout(infos, 1).items():
        format_.write(folder, file, group, ArraySource(arrays))
    return format_.detect(folder)


def same(found, array):
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == np.ascontiguousarray(array).tobytes()


def test_ours_is_read_by_numpy_and_by_us(tmp_path):
    file = written(tmp_path, ARRAYS)
    theirs = np.load(file)
    with Npz().open(file, writable=True) as mapped:
        assert all(mapped.read(name).ctypes.data % 64 == 0 for name, array in ARRAYS.items() if array.size)
    with Npz().open(file) as reader:
        assert set(theirs.files) == set(reader.tensors) == set(ARRAYS)
        for name, array in ARRAYS.items():
            assert theirs[name].tobytes() == np.ascontiguousarray(array).tobytes()
            same(reader.read(name), array)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("writable", [False, True])
def test_numpys_own(save, writable, tmp_path):
    save(tmp_path / "any name.npz", **ARRAYS, big_endian=ARRAYS["transposed"].astype(">f4"))
    with Npz().open(Npz().detect(tmp_path), writable=writable) as reader:
        for name, array in ARRAYS.items():
            same(reader.read(name), array)
        same(reader.read("big_endian"), ARRAYS["transposed"])


def test_stored_arrays_are_views(tmp_path):
    file = written(tmp_path, {"a": np.zeros(1 << 22)})
    tracemalloc.start()
    with Npz().open(file, writable=True) as reader:
        reader.read("a")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_what_npz_cannot_hold(tmp_path):
    with pytest.raises(CheckpointError, match="float8_e4m3fn, which an npz cannot name"):
        written(tmp_path, {"a": np.ones(3, ml_dtypes.float8_e4m3fn)})
    np.savez(tmp_path / "fp8.npz", a=np.ones(3, ml_dtypes.float8_e4m3fn))
    with pytest.raises(CheckpointError, match="lost which element type"):
        Npz().open(tmp_path / "fp8.npz")


def npy(header, data=b""):
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def archive(members, method=zipfile.ZIP_STORED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as made, warnings.catch_warnings(action="ignore"):
        for name, content in members:
            made.writestr(name, content)
    return stream.getvalue()


def header(descr="'<f4'", order="False", shape="(3,)"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"


GOOD = npy(header(), bytes(12))


def overlapping():
    """Two entries of the table of contents that share their bytes, as in zip bombs."""
    content = bytearray(archive([("a.npy", GOOD), ("b.npy", GOOD)]))
    first, second = content.find(b"PK\x01\x02"), content.rfind(b"PK\x01\x02")
    content[second + 42 : second + 46] = content[first + 42 : first + 46]
    return bytes(content)


def with_size(size):
    """A deflated member that says it has `size` bytes."""
    content = bytearray(archive([("a.npy", npy(header(shape=f"({size // 4},)")))], zipfile.ZIP_DEFLATED))
    at = content.find(b"PK\x01\x02")
    content[at + 24 : at + 28] = struct.pack("<I", size)
    return bytes(content)


def deflated_longer():
    """A member that inflates to more than it says."""
    body = npy(header(shape="(250000,)"), bytes(1_000_000))
    content = bytearray(archive([("a.npy", body)], zipfile.ZIP_DEFLATED))
    small = npy(header(shape="(250000,)"), bytes(1_000_000))[: len(body) - 4]
    at = content.find(b"PK\x01\x02")
    content[at + 24 : at + 28] = struct.pack("<I", len(small))
    return bytes(content)


class Trap:
    """Pickled, it would leave a mark when it is loaded."""

    def __reduce__(self):
        return (os.putenv, ("EASYTORCH_TEST_TRAP", "1"))


def pickled():
    stream = io.BytesIO()
    np.savez(stream, a=np.array([Trap()], object))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a whole npz"),
        (b"PK\x05\x06" + bytes(10), "not a whole npz"),
        (archive([("a.npy", GOOD)])[:-30], "not a whole npz"),
        (archive([("a.txt", b"x")]), "not an array"),
        (archive([(".npy", GOOD)]), "not an array"),
        (archive([("a.npy", GOOD), ("a.npy", GOOD)]), "twice"),
        (archive([("a.npy", b"")]), "does not start as"),
        (archive([("a.npy", b"\x93NUMPY\x09\x00")]), "does not start as"),
        (archive([("a.npy", GOOD[:-1])]), "and 11 are there"),
        (archive([("a.npy", b"\x93NUMPY\x01\x00\xff\xff" + b" " * 70000)]), "no header"),
        (archive([("a.npy", npy("__import__('os')"))]), "not a Python literal"),
        (archive([("a.npy", npy("[" * 500 + "]" * 500))]), "header"),
        (archive([("a.npy", npy("{}"))]), "without descr"),
        (archive([("a.npy", npy(header(shape="[3]"), bytes(12)))]), "not a tuple"),
        (archive([("a.npy", npy(header(shape="(-3,)"), bytes(12)))]), "not a tuple"),
        (archive([("a.npy", npy(header(shape="(0, 4611686018427387904)"), b""))]), "more than an array"),
        (archive([("a.npy", npy(header(shape=f"({'1,' * 40})"), bytes(4)))]), "more than an array"),
        (archive([("a.npy", npy(header(descr="'|O'"), bytes(12)))]), "objects are pickled"),
        (archive([("a.npy", npy(header(descr="[('a', '<f4')]"), bytes(12)))]), "objects are pickled"),
        (archive([("a.npy", npy(header(descr="'<f7'"), bytes(21)))]), "no element type"),
        (archive([("a.npy", npy(header(descr="'<f16'"), bytes(48)))]), "no checkpoint has"),
        (archive([("a.npy", GOOD)], zipfile.ZIP_BZIP2), "compressed by method 12"),
        (overlapping(), "also those of"),
        (with_size(2_000_000_000), "more than weights deflate"),
        (pickled(), "objects are pickled"),
    ],
)
def test_a_file_that_lies(content, match, tmp_path):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=match) as caught:
        Npz().open(tmp_path / "a.npz")
    assert str(tmp_path / "a.npz") in str(caught.value)
    assert "EASYTORCH_TEST_TRAP" not in os.environ


def test_a_member_that_inflates_to_more(tmp_path):
    (tmp_path / "a.npz").write_bytes(deflated_longer())
    with pytest.raises(CheckpointError, match="declares float32"):
        Npz().open(tmp_path / "a.npz")
    content = bytearray(archive([("a.npy", npy(header(shape="(250000,)"), bytes(1_000_000)))], zipfile.ZIP_DEFLATED))
    # The same sizes, but the stream goes on: a header that promises less than it inflates to.
    short = npy(header(shape="(249999,)"), bytes(999_996))
    at = content.find(b"PK\x01\x02")
    content[at + 24 : at + 28] = struct.pack("<I", len(short))
    (tmp_path / "b.npz").write_bytes(bytes(content).replace(b"250000", b"249999"))
    with pytest.raises(CheckpointError):
        Npz().open(tmp_path / "b.npz").read("a")


def test_a_flipped_bit_of_a_deflated_member(tmp_path):
    content = bytearray(archive([("a.npy", npy(header(shape="(3000,)"), RNG.bytes(12000)))], zipfile.ZIP_DEFLATED))
    content[6000] ^= 1
    (tmp_path / "a.npz").write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"damaged|inflated"):
        Npz().open(tmp_path / "a.npz").read("a")


@pytest.mark.parametrize("size", [HEADER_BYTES, HEADER_BYTES + 1, 1 << 20])
def test_a_header_longer_than_numpys_is_not_parsed(size, tmp_path):
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}".ljust(size - 12)
    content = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text
    assert len(content) == size
    if size <= HEADER_BYTES:
        assert read_npy_header(content, tmp_path, "a").shape == (3,)
        return
    with pytest.raises(CheckpointError, match="is no header"):
        read_npy_header(content, tmp_path, "a")
