"""Tensors that are written without being made whole: chunks, stacks and casts, held against numpy's own."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax.serialization import to_bytes
from safetensors.numpy import load_file, save_file

from easytorch.bridge.convert import convert
from easytorch.bridge.core.in_parts import InParts, read_in_parts
from easytorch.bridge.core.mapped import Unread
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import FLOATING, numpy_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.msgpack_files.flax_msgpack import FlaxMsgpack
from easytorch.bridge.formats.parallel_write import Elements, write_parts
from easytorch.bridge.rules.computed_transforms import interleaved, scaled, unfolded
from easytorch.bridge.rules.head_transforms import stacked
from easytorch.bridge.rules.plan import Step, cast_plan
from easytorch.bridge.rules.transforms import get_transform

RNG = np.random.default_rng(0)


class Parts:
    """A source of one tensor."""

    config = None

    def __init__(self, data: InParts) -> None:
        self.data = data

    def read(self, name: str) -> np.ndarray:
        raise AssertionError("was asked for the whole tensor")

    def read_in_parts(self, name: str) -> InParts:
        return self.data

    def wrote(self, info: TensorInfo) -> None:
        pass


def _written(data: InParts, file: Path) -> bytes:
    write_parts(file, [Elements(TensorInfo("x", data.shape, data.dtype.name), {5: b"between"})], Parts(data))
    return file.read_bytes()


def _numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random bits: every NaN, infinity and subnormal there is."""
    element = numpy_dtype(dtype)
    return np.frombuffer(RNG.bytes(int(np.prod(shape)) * element.itemsize), element).reshape(shape)


def _held(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` with 1 for every number that `dtype` cannot hold, which no cast is given."""
    with np.errstate(all="ignore"):
        numbers, made = np.isfinite(array.astype(np.float64)), np.isfinite(array.astype(dtype).astype(np.float64))
    return np.where(numbers & ~made, np.ones((), array.dtype), array)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("given", ["float32", "float64", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("made", sorted(FLOATING))
def test_a_cast_is_numpys_bit_for_bit(given: str, made: str, tmp_path: Path) -> None:
    whole = _numbers((1030, 517), given)
    if np.can_cast(whole.dtype, numpy_dtype(made), casting="unsafe"):
        whole = _held(whole, numpy_dtype(made))
    for array in (whole, whole.T, whole[::2, ::-1]):
        if not np.can_cast(array.dtype, numpy_dtype(made), casting="unsafe"):
            continue
        expected = array.astype(numpy_dtype(made))
        data = InParts.of(array).cast(numpy_dtype(made))
        width = 5 * expected.itemsize
        stream = np.ascontiguousarray(expected).tobytes()
        assert _written(data, tmp_path / "file") == stream[:width] + b"between" + stream[width:]
        assert data.whole().tobytes() == expected.tobytes()


def test_casting_twice_rounds_twice() -> None:
    # Between two numbers of float8, a hair above the middle: float16 drops the hair.
    array = np.array([1.0625 + 2**-20], np.float32)
    once = InParts.of(array).cast(numpy_dtype("float8_e4m3fn"))
    twice = InParts.of(array).cast(numpy_dtype("float16")).cast(numpy_dtype("float8_e4m3fn"))
    assert once.whole() == 1.125 and twice.whole() == 1.0


def test_parts_of_any_strides_follow_one_another(tmp_path: Path) -> None:
    parts = [_numbers((70, 90), "int16").T, _numbers((3, 5), "int16"), _numbers((0, 4), "int16"), _numbers((), "int16")]
    data = InParts.joined(parts, (2, 3158))
    expected = b"".join(part.tobytes() for part in parts)
    assert _written(data, tmp_path / "file") == expected[:10] + b"between" + expected[10:]
    assert data.whole().tobytes() == expected and data.whole().shape == (2, 3158)
    cast = data.cast(np.dtype(np.float64))
    assert cast.whole().tobytes() == data.whole().astype(np.float64).tobytes()
    with pytest.raises(AssertionError, match="do not fill"):
        InParts.joined(parts, (3158,))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("layer", ["linear", "identity"])
def test_a_stack_is_numpys(layer: str, axis: int) -> None:
    arrays = [_numbers((66, 130), "float16") for _ in range(6)]
    turned = [array.T if layer == "linear" else array for array in arrays]
    one, linear = stacked(layer, 6, axis), layer == "linear"
    transforms = {one: np.stack(turned, axis)}
    if axis == 0:
        transforms[unfolded(one, (2, 3))] = np.stack(turned).reshape(2, 3, *turned[0].shape)
        transforms[scaled(one, 2.0, wide=True)] = np.stack(turned).astype(np.float32) * 2
        if linear:
            pairs = interleaved(get_transform("linear"), 1)
            transforms[stacked(pairs, 6, 0)] = np.stack([_woven(array).T for array in arrays])
    for transform, expected in transforms.items():
        info = TensorInfo("leaf", transform.flax_shape([array.shape for array in arrays]), expected.dtype.name)
        step = Step(tuple("abcdef"), (info,), transform, False)
        (made,) = step.run(arrays)
        (parts,) = step.run_in_parts(list(map(InParts.of, arrays)))
        assert made.shape == parts.shape == info.shape
        assert made.tobytes() == parts.whole().tobytes() == expected.tobytes(), transform.name
        if transform is one and axis == 0:
            assert all(np.shares_memory(part, array) for part, array in zip(parts.parts, arrays, strict=True))


def _woven(array: np.ndarray) -> np.ndarray:
    made = np.empty_like(array)
    made[0::2], made[1::2] = np.split(array, 2)
    return made


def test_the_chunks_of_flax_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flax.serialization.MAX_CHUNK_SIZE", 1000)
    array = _numbers((40, 33), "float32")
    (tmp_path / "flax_model.msgpack").write_bytes(to_bytes({"a": {"x": array}, "y": array[0]}))
    with FlaxMsgpack().open(tmp_path / "flax_model.msgpack") as reader:
        data = read_in_parts(reader, "a/x")
        assert [part.size * part.dtype.itemsize for part in data.parts] == [1000] * 5 + [280]
        assert all(isinstance(part, Unread) for part in data.parts)
        assert reader.read("a/x").tobytes() == data.whole().tobytes() == array.tobytes()
        assert len(read_in_parts(reader, "y").parts) == 1


def test_a_cast_that_numpy_does_not_know_is_refused() -> None:
    arrays = {"a": np.ones((2, 2), np.float32), "b": np.ones(3, ml_dtypes.float8_e4m3fn)}
    infos = {name: TensorInfo(name, array.shape, array.dtype.name) for name, array in arrays.items()}
    assert cast_plan(infos, "bfloat16").targets["b"].dtype == "bfloat16"
    with pytest.raises(CheckpointError, match="'b': float8_e4m3fn cannot be cast to float8_e8m0fnu"):
        cast_plan(infos, "float8_e8m0fnu")


def test_a_conversion_casts_as_numpy_does(tmp_path: Path) -> None:
    narrow = numpy_dtype("bfloat16")
    weights = {name: _held(_numbers((300, 200), "float32"), narrow) for name in ("a", "b")} | {"n": np.arange(3)}
    save_file(weights, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to="torch", dtype="bf16")
    made = load_file(tmp_path / "out.safetensors")
    for name in ("a", "b"):
        assert made[name].tobytes() == weights[name].astype(ml_dtypes.bfloat16).tobytes()
    assert made["n"].tobytes() == weights["n"].tobytes()
