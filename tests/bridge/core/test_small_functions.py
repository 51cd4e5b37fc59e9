"""Each small function of the bridge by a table: what goes in, what comes out, which words refuse the rest."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from easytorch.bridge.core.blocks import WRITE_BYTES, byte_blocks, contiguous, pieces
from easytorch.bridge.core.casting import CastOverflow, cast
from easytorch.bridge.core.compare import bits, identical, identical_parts
from easytorch.bridge.core.config import Config, find_config, given_config, read_config
from easytorch.bridge.core.in_parts import InParts
from easytorch.bridge.core.json_files import read_json
from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.core.printable import printable
from easytorch.bridge.core.sizes import human_size, parse_size
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.core.weight_files import is_weights
from easytorch.bridge.dtypes import FLOATING, floating_dtype, to_numpy, to_torch, torch_stores
from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.formats.array_chunks import chunk_shape, in_one_window, windows
from easytorch.bridge.formats.sharding import find, shard_names, split, write_index
from easytorch.bridge.formats.steps import at_step, step_folder, step_read, steps_in
from easytorch.bridge.formats.zarr_metadata import ZarrArray, parse
from easytorch.bridge.jobs.locations import is_remote
from easytorch.bridge.rules.head_transforms import joined, stacked
from easytorch.bridge.rules.transforms import get_transform

SIZES = {
    "5GB": 5 * 10**9, "512MiB": 512 << 20, "100": 100, "1.5kb": 1500, " 2 TB ": 2 * 10**12, "1KiB": 1024, "7b": 7,
    "1GiB": 1 << 30, "3MB": 3 * 10**6, "1TiB": 1 << 40, 64: 64,
}  # fmt: skip
NO_SIZES = ("", "0", "-1", "5XB", "GB", "1e3", "0.1", "5 G B", "1I", None)


def test_sizes():
    assert {text: parse_size(text) for text in SIZES} == SIZES
    for text in NO_SIZES:
        with pytest.raises(ValueError, match="is not a size; write a number and KB"):
            parse_size(text)
    shown = {
        0: "0 B",
        999: "999 B",
        1000: "1 KB",
        1234567: "1.23 MB",
        10**9: "1 GB",
        10**12: "1 TB",
        2 * 10**15: "2000 TB",
    }
    assert {size: human_size(size) for size in shown} == shown


def test_text_that_is_printed_is_visible():
    assert printable("a b.c") == "a b.c" and printable("a\x1b[1m\u202eé\ud800") == r"a\x1b[1m\u202eé\ud800"
    assert printable("\n") == r"\n"


def test_an_error_is_one_line_of_where_and_what():
    error = CheckpointError("is wrong\nhere", file=Path("f"), tensor="t")
    assert str(error) == "f: tensor 't': is wrong here" and (error.file, error.tensor) == ("f", "t")
    assert str(CheckpointError("x")) == "x" and CheckpointError("x").file is None
    assert str(CheckpointError("x", tensor="t")) == "tensor 't': x"
    assert len(str(CheckpointError("x" * 9000))) < 4100 and " ... " in str(CheckpointError("x" * 9000))
    assert len(str(CheckpointError("x" * 4000))) == 4000
    assert nearest("qurey", ["key", "query"]) == " (nearest known name: 'query')" and nearest("zzz", ["query"]) == ""
    assert nearest("q" * 301, ["q" * 300]) == "" and nearest("q" * 300, ["q" * 300]) != ""


def test_trees_and_paths():
    tree = {"a": {"b": 1, "c": [2, {"d": 3}]}, "e": 4, "none": {}}
    leaves = {"a/b": 1, "a/c/0": 2, "a/c/1/d": 3, "e": 4}
    assert flat(tree) == leaves and list(flat(tree)) == list(leaves)
    assert nested(leaves) == {"a": {"b": 1, "c": {"0": 2, "1": {"d": 3}}}, "e": 4}
    assert flat({"a": (1, 2)}, separator=".") == {"a.0": 1, "a.1": 2}
    assert nested({"a.b": 1}, separator=".") == {"a": {"b": 1}}
    assert tree == {"a": {"b": 1, "c": [2, {"d": 3}]}, "e": 4, "none": {}}
    for both in ({"a": {"b": 1}, "a/b": 2}, {"a/b": 2, "a": {"b": 1}}):
        with pytest.raises(CheckpointError, match="'a/b': is the path of two tensors"):
            flat(both)
    with pytest.raises(CheckpointError, match="'a/b': another tensor has a part of this path"):
        nested({"a": 1, "a/b": 2})
    with pytest.raises(CheckpointError, match="'a': is both a tensor and a folder"):
        nested({"a/b": 2, "a": 1})


def test_json_of_strangers(tmp_path):
    file = tmp_path / "x.json"
    with pytest.raises(CheckpointError, match=r"x\.json: cannot be read: No such file"):
        read_json(file, limit=10)
    file.write_text('{"a": 12}')
    assert read_json(file, limit=9) == {"a": 12}
    with pytest.raises(CheckpointError, match="is larger than 8 bytes"):
        read_json(file, limit=8)
    for content, match in (
        ("{", "is not valid JSON"),
        ("[1]", "a JSON list, not an object"),
        ("[" * 50000, "not valid"),
    ):
        file.write_text(content)
        with pytest.raises(CheckpointError, match=match):
            read_json(file, limit=1 << 20)


def test_configs(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    assert find_config(tmp_path) is None and find_config(weights) is None
    for path in (tmp_path, weights):
        with pytest.raises(CheckpointError, match=r"no config\.json beside the weights"):
            read_config(path)
    with pytest.raises(CheckpointError, match=r"no config\.json in this folder"):
        given_config(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such config"):
        given_config(tmp_path / "other.json")
    with pytest.raises(CheckpointError, match="holds weights and is no config"):
        given_config(weights)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["FlaxBertModel"]}))
    file = tmp_path / "config.json"
    for found in (find_config(weights), read_config(tmp_path), given_config(tmp_path), given_config(file)):
        assert (found.model_type, found.architecture) == ("bert", "BertModel")
        assert found.file == tmp_path / "config.json"
    assert Config(tmp_path, {}).architecture is None
    for wrong in (None, 3, "", "../up", "a/b", "-x"):
        with pytest.raises(CheckpointError, match="`model_type` is"):
            _ = Config(tmp_path, {"model_type": wrong}).model_type
    for wrong in ("Bert", [], [3]):
        with pytest.raises(CheckpointError, match="`architectures` is"):
            _ = Config(tmp_path, {"architectures": wrong}).architecture


def test_which_files_hold_weights():
    for name in ("a.safetensors", "pytorch_model.bin", "x.msgpack", "x.gguf", "model.safetensors.index.json", "a.npz"):
        assert is_weights(name)
    for name in ("config.json", "tokenizer.model", "README.md", "bin", "a.safetensors.txt"):
        assert not is_weights(name)


def test_casts_round_and_never_overflow():
    array = np.array([1.5, -2.25, np.inf, np.nan, 65504.0], np.float32)
    made = cast(array, np.dtype(np.float16))
    assert made.dtype == np.float16 and np.array_equal(made, array.astype(np.float16), equal_nan=True)
    assert cast(array, array.dtype) is array
    with pytest.raises(CastOverflow, match=r"holds 6.552e\+04, and the largest float16 is 6.55e\+04"):
        cast(np.array([1.0, 65520.0], np.float32), np.dtype(np.float16))
    with pytest.raises(CastOverflow, match=r"holds -1e\+39"):
        cast(np.array([-1e39]), np.dtype(np.float32))
    assert "tensor 'w'" in str(CastOverflow("x").of("w"))
    with pytest.raises(CastOverflow, match="neither zero nor negative"):
        cast(np.array([0.0], np.float32), np.dtype(ml_dtypes.float8_e8m0fnu))
    assert cast(np.array([3e38], np.float32), np.dtype(ml_dtypes.bfloat16))[0] > 2.9e38


def test_bits_and_not_values_are_compared():
    nan, zero = np.array([np.nan, 0.0], np.float32), np.array([np.nan, -0.0], np.float32)
    assert identical(nan, nan.copy()) and not identical(nan, zero)
    assert not identical(nan, nan.astype(np.float64)) and not identical(nan, nan[None])
    turned = np.arange(600, dtype=np.int16).reshape(20, 30)
    assert identical(turned.T, np.ascontiguousarray(turned.T)) and not identical(turned.T, turned.T[::-1])
    assert bits(zero).tolist()[1] == 1 << 31 and bits(np.array([1j])).shape == (2,)
    one, other = InParts.joined((turned[:5], turned[5:]), (20, 30)), InParts.of(turned)
    assert identical_parts(one, other) and not identical_parts(one, InParts.of(turned + 1))
    assert not identical_parts(one, InParts.of(turned.reshape(30, 20)))
    last = turned.copy()
    last[-1, -1] += 1
    assert not identical_parts(one, InParts.of(last)) and not identical(turned, last)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_blocks_are_the_bytes_in_c_order(order):
    array = np.arange(7 * 65 * 67, dtype=np.float32).reshape(7, 65, 67).transpose(order)
    kept = array.copy()
    assert b"".join(map(bytes, byte_blocks(array))) == np.ascontiguousarray(array).tobytes()
    assert max(len(block) for block in byte_blocks(array)) <= WRITE_BYTES
    whole = np.concatenate([piece.reshape(-1) for piece in pieces(array)])
    assert whole.tobytes() == np.ascontiguousarray(array).tobytes()
    out = np.empty(array.shape, array.dtype)
    assert contiguous(array, out) is out and np.array_equal(out, kept) and np.array_equal(array, kept)
    assert (contiguous(array) is array) == array.flags.c_contiguous
    for odd in (array[:0], array[:1, :1, :1], array[::-1], array[:, ::2], array[..., ::-3]):
        assert b"".join(map(bytes, byte_blocks(odd))) == np.ascontiguousarray(odd).tobytes()


def test_parts_are_cast_once_and_views_where_they_can_be():
    array = np.arange(6, dtype=np.float32)
    assert InParts.of(array).whole().base is array or InParts.of(array).whole() is array
    parts = InParts.joined((array[:2], array[2:]), (3, 2))
    assert np.array_equal(parts.whole(), array.reshape(3, 2)) and parts.cast(np.dtype("f4")) is parts
    twice = (
        InParts.of(np.array([1 + 2**-8 + 2**-20], np.float64)).cast(np.dtype(ml_dtypes.bfloat16)).cast(np.dtype("f8"))
    )
    assert twice.whole()[0] in (1.0, 1.0 + 2**-7) and twice.stored == np.dtype(ml_dtypes.bfloat16)
    with pytest.raises(AssertionError, match="2 parts do not fill"):
        InParts.joined((array[:2], array[2:]), (7,))


def test_element_types():
    assert (
        floating_dtype("bf16") == "bfloat16"
        and floating_dtype("half") == "float16"
        and floating_dtype("fp32") == "float32"
    )
    for wrong in ("int8", "bool", "fp4", ""):
        with pytest.raises(ValueError, match=f"dtype {wrong!r} is not a floating point type; accepted: bf16, bfloat16"):
            floating_dtype(wrong)
    assert "float8_e4m3fn" in FLOATING and "int4" not in FLOATING
    for dtype in (torch.bfloat16, torch.float8_e5m2, torch.float32, torch.int64, torch.bool, torch.complex64):
        tensor = torch.arange(4).to(torch.float32).to(dtype)
        array = to_numpy(tensor)
        assert array.dtype.name == str(dtype).removeprefix("torch.")
        assert torch.equal(to_torch(array).view(torch.uint8), tensor.view(torch.uint8))
        assert array.ctypes.data == tensor.data_ptr() == to_torch(array).data_ptr(), "a view"
    locked = np.arange(3.0)
    locked.flags.writeable = False
    to_torch(locked)[0] = 9.0
    assert locked[0] == 0.0, "what may not be written to is copied"
    assert to_numpy(torch.tensor([1j]).conj())[0] == -1j
    assert not torch_stores("int4") and torch_stores("bfloat16")
    with pytest.raises(ValueError, match="torch has no element type 'int4'"):
        to_torch(np.zeros(2, ml_dtypes.int4))
    with pytest.raises(ValueError, match=r"torch dtype torch\.\S+ has no numpy counterpart"):
        to_numpy(torch.empty(2, dtype=torch.complex32))


def info(name, *shape, dtype="float32"):
    return TensorInfo(name, shape, dtype)


def test_shards():
    a, b, c = info("a", 10), info("b", 5), info("c", 100)
    assert [[one.name for one in group] for group in split([a, b, c], 60)] == [["a", "b"], ["c"]]
    assert [[one.name for one in group] for group in split([a, b, c], 59)] == [["a"], ["b"], ["c"]]
    assert [[one.name for one in group] for group in split([c, a, b], 1)] == [["c"], ["a"], ["b"]]
    assert split([], 10) == [[]] and len(split([a, b, c], 3, lambda _: 1)) == 1
    assert shard_names("model.safetensors", 1) == ["model.safetensors"]
    assert shard_names("model.safetensors", 2) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


def test_an_index_and_what_is_found_first(tmp_path):
    assert find(tmp_path, "m.bin", suffixes=(".bin",)) is None
    (tmp_path / "m.bin").touch()
    assert find(tmp_path, "m.bin", suffixes=(".bin",)) == tmp_path / "m.bin"
    write_index(tmp_path / "m.bin.index.json", {"s1": [info("b", 2), info("a", 3)], "s2": [info("c", dtype="bool")]})
    assert find(tmp_path, "m.bin", suffixes=(".bin",)) == tmp_path / "m.bin.index.json"
    assert find(tmp_path / "m.bin", "other", suffixes=(".bin",)) == tmp_path / "m.bin"
    assert find(tmp_path / "m.bin", "m.bin", suffixes=(".pt",)) is None
    content = json.loads((tmp_path / "m.bin.index.json").read_text())
    assert content == {"metadata": {"total_size": 21}, "weight_map": {"a": "s1", "b": "s1", "c": "s2"}}


def test_sizes_of_tensors():
    assert info("a").nbytes == 4 and info("a", 0, 3).nbytes == 0 and info("a", 2, 3, dtype="bfloat16").nbytes == 12
    packed = TensorInfo("a", (32,), "float32", "f", "Q4_0", 18)
    assert packed.stored_bytes == 18 and packed.nbytes == 128 and info("a", 2).stored_bytes == 8
    assert TensorInfo("a", (1,), "bool", "f") == TensorInfo("a", (1,), "bool", "g")


def test_steps_of_a_run(tmp_path):
    for name in ("step_9", "checkpoint-10", "100", "x7y", "8.json"):
        (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).touch()
    steps = steps_in(tmp_path)
    assert list(steps) == [9, 10, 100] and steps[10] == tmp_path / "checkpoint-10"
    assert steps_in(tmp_path / "8.json") == {}
    assert step_folder(tmp_path, tmp_path / "step_9" / "params") == tmp_path / "step_9"
    assert step_folder(tmp_path, tmp_path / "100", steps) == tmp_path / "100"
    assert step_folder(tmp_path, tmp_path / "x7y" / "a") is None
    assert step_read(tmp_path, tmp_path / "100" / "a", steps) == "step 100 is read, of 9, 10, 100"
    assert step_read(tmp_path / "step_9", tmp_path / "step_9", {}) == "step 9 is read"
    assert step_read(tmp_path, tmp_path / "x7y", {}) is None
    for step in (9, 11):
        with pytest.raises(CheckpointError, match=rf"has no step {step}; there are no steps in it"):
            at_step(tmp_path, step, steps)


V2 = {"chunks": [2, 3], "shape": [4, 5], "dtype": "<f4"}
V3 = {"shape": [4], "data_type": "bfloat16", "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3]}}}


def test_zarr_metadata():
    found = parse(json.dumps(V2).encode(), "zarr")
    assert found == ZarrArray("zarr", (4, 5), "float32", (2, 3)) and found.chunk_count == 4
    assert parse(json.dumps(V3).encode(), "zarr3") == ZarrArray("zarr3", (4,), "bfloat16", (3,))
    for code, name in (
        ("|b1", "bool"),
        (">i8", "int64"),
        ("<c16", "complex128"),
        ("bfloat16", "bfloat16"),
        ("|u1", "uint8"),
    ):
        assert parse(json.dumps(V2 | {"dtype": code}).encode(), "zarr").dtype == name
    for wrong in ("<f3", "<x4", "f4", "|O", None, 4, "<f32"):
        with pytest.raises(ValueError, match="element type that is not known"):
            parse(json.dumps(V2 | {"dtype": wrong}).encode(), "zarr")
    for change in (
        {"shape": [4]}, {"shape": [-1, 5]}, {"chunks": [0, 3]}, {"shape": [4.0, 5]}, {"shape": [True, 5]},
        {"shape": [2**63, 5]}, {"shape": "45"}, {"chunks": None}, {"shape": [1] * 33, "chunks": [1] * 33},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="are not lists of sizes"):
            parse(json.dumps(V2 | change).encode(), "zarr")
    assert parse(json.dumps(V2 | {"shape": [0, 5]}).encode(), "zarr").chunk_count == 0
    for grid in ({"name": "other", "configuration": {"chunk_shape": [3]}}, {"name": "regular"}, 3):
        with pytest.raises(ValueError, match="not lists of sizes"):
            parse(json.dumps(V3 | {"chunk_grid": grid}).encode(), "zarr3")
    with pytest.raises(ValueError, match="is not a JSON object"):
        parse(b"[1]", "zarr")


def test_chunks_and_windows_cover_an_array():
    small, large = info("a", 3, 5), info("a", 40, 1 << 20)
    assert chunk_shape(small) == (3, 5) and chunk_shape(info("a")) == () and chunk_shape(info("a", 0, 4)) == (1, 4)
    shape = chunk_shape(large)
    assert shape == (4, 1 << 20) and in_one_window(small) and not in_one_window(large)
    assert in_one_window(info("a", 16 << 20)) and not in_one_window(info("a", (16 << 20) + 1))
    for sizes, chunks, item in (
        ((40, 1 << 20), shape, 4),
        ((7, 5), (2, 3), 8 << 20),
        ((1,), (1,), 4),
        ((9, 4, 4), (2, 4, 4), 1 << 20),
    ):
        boxes, seen = windows(sizes, chunks, item), np.zeros(sizes, np.int8)
        for box in boxes:
            seen[box] += 1
            assert all(one.start % chunk == 0 for one, chunk in zip(box, chunks, strict=True))
        assert (seen == 1).all()


def test_urls():
    for url in ("gs://b/x", "s3://b", "hf://org/name", "simplecache::gs://b/x", "file:///a"):
        assert is_remote(url)
    for path in ("a/b", "/a://", "c:/x", Path("gs://b"), ""):
        assert not is_remote(path)


def test_layouts_that_cannot_be_are_refused():
    linear = get_transform("linear")
    layers, halves = stacked(linear, 3, 0), joined(linear, 2)
    assert layers.flax_shape([(2, 4)] * 3) == (3, 4, 2) and list(layers.torch_shapes((3, 4, 2))) == [(2, 4)] * 3
    with pytest.raises(CheckpointError, match=r"layers of one stack have the shapes \[\(2, 4\), \(2, 5\)\]"):
        layers.flax_shape([(2, 4), (2, 5), (2, 4)])
    for shape in ((2, 4, 2), ()):
        with pytest.raises(CheckpointError, match="is no stack of 3 along axis 0"):
            layers.torch_shapes(shape)
    assert halves.flax_shape([(4, 2), (4, 2)]) == (4, 4)
    with pytest.raises(CheckpointError, match="leaves of one matrix have the shapes"):
        halves.flax_shape([(4, 2), (4, 3)])
    with pytest.raises(CheckpointError, match="5 rows are not a multiple of 2 heads or parts"):
        halves.torch_shapes((5, 4))
    arrays = [np.arange(8.0).reshape(2, 4) + 10 * n for n in range(3)]
    kept = [one.copy() for one in arrays]
    for axis in (0, 1, 2):
        one = stacked("linear", 3, axis)
        leaf = one.to_flax(arrays)
        assert leaf.shape == one.flax_shape([(2, 4)] * 3)
        assert all(np.array_equal(there, here) for there, here in zip(one.to_torch(leaf), kept, strict=True))
    assert all(np.array_equal(one, other) for one, other in zip(arrays, kept, strict=True))
