"""Flax msgpack: the bytes flax itself writes, both ways."""

import base64

import ml_dtypes
import msgpack
import numpy as np
import pytest

from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.msgpack_files import stream, walk
from easytorch.bridge.load_tree import load_tree
from easytorch.bridge.save_tree import save_tree

# flax 0.12.8, flax.serialization.msgpack_serialize(TREE) with MAX_CHUNK_SIZE = 64, so that `table` is chunked.
RECORDED = base64.b64decode(
    "gqtiYXRjaF9zdGF0c4KkbWVhbscXAZORAaljb21wbGV4NjTECAAAgD8AAABApXRhYmxlg7lfX21zZ3BhY2tfY2h1bmtlZF9hcnJh"
    "eV9fw6VzaGFwZYKhMAShMQqmY2h1bmtzgqEwx0sBk5EgpWludDE2xEAAAAEAAgADAAQABQAGAAcACAAJAAoACwAMAA0ADgAPABAA"
    "EQASABMAFAAVABYAFwAYABkAGgAbABwAHQAeAB8AoTHHGwGTkQilaW50MTbEECAAIQAiACMAJAAlACYAJwCmcGFyYW1zhKVkZW5z"
    "ZYKkYmlhc8cSAZORAqhiZmxvYXQxNsQEgD8gwKZrZXJuZWzHJgGTkgIDp2Zsb2F0MzLEGAAAAAAAAIA/AAAAQAAAQEAAAIBAAACg"
    "QKVlbXB0eccOAZOSAAOnZmxvYXQxNsQApGZsYWfHDAGTkQKkYm9vbMQCAQCkc3RlcMcOAZOQpWludDMyxAQHAAAA"
)
TREE = {
    "batch_stats": {"mean": np.array([1 + 2j], "c8"), "table": np.arange(40, dtype="i2").reshape(4, 10)},
    "params": {
        "dense": {
            "bias": np.array([1, -2.5], ml_dtypes.bfloat16),
            "kernel": np.arange(6, dtype="f4").reshape(2, 3),
        },
        "empty": np.zeros((0, 3), "f2"),
        "flag": np.array([True, False]),
        "step": np.array(7, "i4"),
    },
}


def same_trees(one, other):
    first, second = flat(one), flat(other)
    return list(first) == list(second) and all(
        first[path].dtype == second[path].dtype
        and first[path].shape == second[path].shape
        and first[path].tobytes() == second[path].tobytes()
        for path in first
    )


def test_writes_what_flax_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "CHUNK_BYTES", 64)
    save_tree(TREE, tmp_path / "new")
    assert (tmp_path / "new" / "flax_model.msgpack").read_bytes() == RECORDED
    transposed = {"batch_stats": TREE["batch_stats"] | {"table": np.asfortranarray(TREE["batch_stats"]["table"])}}
    save_tree(transposed | {"params": TREE["params"]}, tmp_path / "fortran")
    assert (tmp_path / "fortran" / "flax_model.msgpack").read_bytes() == RECORDED


def test_reads_what_flax_writes(tmp_path):
    file = tmp_path / "flax_model.msgpack"
    file.write_bytes(RECORDED)
    assert same_trees(load_tree(file), TREE)


@pytest.mark.parametrize("size", [0, 1, 200, 300, 70_000], ids=lambda size: f"{size} bytes")
def test_every_width_of_frame(tmp_path, size):
    tree = {"a": np.arange(size, dtype=np.uint8), "b": np.array(3.5)}
    save_tree(tree, tmp_path / "new")
    assert same_trees(load_tree(tmp_path / "new"), tree)


def test_scalars_lists_and_old_encodings(tmp_path):
    """A training state has plain numbers; flax before 0.3 wrote text where bytes stand today."""
    array = msgpack.ExtType(1, msgpack.packb(([2], "int8", b"\x01\x02"), use_bin_type=False))
    scalar = msgpack.ExtType(3, msgpack.packb(([], "float32", np.float32(0.5).tobytes())))
    content = {
        "step": 5,
        "lr": 0.25,
        "on": True,
        "z": msgpack.ExtType(2, msgpack.packb((1.0, 2.0))),
        "l": [array, scalar],
    }
    (tmp_path / "x.msgpack").write_bytes(msgpack.packb(content, use_bin_type=False))
    leaves = flat(load_tree(tmp_path / "x.msgpack"))
    assert {path: leaf.tolist() for path, leaf in leaves.items()} == {
        "step": 5, "lr": 0.25, "on": True, "z": 1 + 2j, "l/0": [1, 2], "l/1": 0.5,
    }  # fmt: skip


def ndarray(shape, dtype, data):
    return msgpack.ExtType(1, msgpack.packb((shape, dtype, data)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (msgpack.packb(3), "map of names"),
        (msgpack.packb({"a": ndarray([2], "float32", b"1234")}), "takes 8 bytes, 4"),
        (msgpack.packb({"a": ndarray([2**40, 2**40], "float32", b"")}), "takes"),
        (msgpack.packb({"a": ndarray([-1], "int8", b"")}), "list of sizes"),
        (msgpack.packb({"a": ndarray([1] * 40, "int8", b"1")}), "at most 32"),
        (msgpack.packb({"a": ndarray([1], "object", b"12345678")}), "unknown dtype 'object'"),
        (msgpack.packb({"a": msgpack.ExtType(9, b"x")}), "extension 9"),
        (msgpack.packb({"a": "text"}), "not an array"),
        (msgpack.packb({"a": None}), "not an array"),
        (msgpack.packb({"a": 2**64 - 1}), "not an array"),
        (b"\x82\xa1a\x01\xa1a\x01", "twice"),
        (b"\x81\xa1a\xdf\xff\xff\xff\xff", "truncated"),
        (b"\x81\xa1a\xc6\xff\xff\xff\xff", "truncated"),
        (b"\x81\xa1a\xc1", "no msgpack object"),
        (b"\x81\xa1\xff\x01", "UTF-8"),
        (b"\x81\xa1a" * 500 + b"\x01", "nested deeper"),
        (msgpack.packb({"a": 1}) + b"\x00", "after its end"),
        (msgpack.packb({"a": {"b": 1}, "a/b": 2}), "read the same"),
        (msgpack.packb({"a": {"__msgpack_chunked_array__": True, "shape": {"0": 3}, "chunks": {}}}), "chunks"),
        (
            msgpack.packb(
                {
                    "a": {
                        "__msgpack_chunked_array__": True,
                        "shape": {"0": 3},
                        "chunks": {"0": ndarray([2], "int8", b"12")},
                    }
                }
            ),
            "hold 2 elements",
        ),
    ],
)
def test_malformed_files(tmp_path, content, message):
    (tmp_path / "flax_model.msgpack").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tree(tmp_path)
    assert "flax_model.msgpack" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_leaves_than_a_checkpoint_has_are_refused(tmp_path, monkeypatch):
    (tmp_path / "flax_model.msgpack").write_bytes(msgpack.packb({str(number): number for number in range(9)}))
    monkeypatch.setattr(walk, "_MAX_LEAVES", 8)
    with pytest.raises(CheckpointError, match="more than 8 leaves"):
        load_tree(tmp_path)


def test_a_leaf_and_a_branch_of_one_name_are_refused():
    with pytest.raises(CheckpointError, match="a/b"):
        nested({"a": 1, "a/b": 2})
    with pytest.raises(CheckpointError, match="both"):
        nested({"a/b": 1, "a": 2})
