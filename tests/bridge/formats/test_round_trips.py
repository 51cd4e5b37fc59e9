"""What every target writes is read back bit for bit, whatever the element type, the shape and the memory it came from.

The targets are those of `jobs.targets`. Which element types one holds is asked of it (`layout`).
"""

import resource
from pathlib import Path

import numpy as np
import pytest

from easytorch.bridge import dtypes
from easytorch.bridge.core.array_source import ArraySource
from easytorch.bridge.core.compare import identical
from easytorch.bridge.core.config import Config
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.jobs import targets
from easytorch.bridge.storage.atomic import new_folder

DTYPES = sorted(dtypes._NUMPY)
# One target of each container.
FORMS = {type(target.format): (name, target.format) for name, target in targets.TARGETS.items()}
TARGETS = pytest.mark.parametrize(
    "format_", [format_ for _, format_ in FORMS.values()], ids=[name for name, _ in FORMS.values()]
)
# What a checkpoint of today holds. Beyond that, formats differ.
COMMON = {"float32", "float16", "bfloat16"}
# What is not GGUF holds these too: it keeps weights in no int64, nor in bool.
ORDINARY = COMMON | {"int8", "int32", "int64", "uint8", "bool", "float64"}

# GGUF states what model it holds.
LLAMA = Config(
    Path("config.json"),
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 16,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-6,
    },
)


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Every bit pattern the element type has: NaNs with payloads, both zeros, denormals."""
    element = dtypes.numpy_dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in ("int4", "uint4"):
        return rng.integers(-8 if dtype == "int4" else 0, 8 if dtype == "int4" else 16, shape).astype(element)
    count = int(np.prod(shape))
    raw = np.frombuffer(rng.bytes(count * element.itemsize), element).copy()
    if count > 1 and "float" in dtype:
        raw[:2] = np.array([-0.0, np.nan]).astype(element)
    return raw.reshape(shape)


def name_in(format_, *parts: str) -> str:
    """A tensor's name as the target's naming scheme has it."""
    if format_.scheme is not None:
        return ".".join(parts)
    # T5X's folders tell parameters from a training loop's files by this.
    return "/".join(("target", *parts) if format_.name == "T5X" else parts)


def holds(format_, dtype: str) -> bool:
    """Whether the format says it can hold the element type."""
    try:
        format_.layout([TensorInfo(name_in(format_, "layer", "weight"), (2, 3), dtype)], 1 << 30)
    except CheckpointError as error:
        assert error.tensor == name_in(format_, "layer", "weight")
        return False
    return True


def write(format_, folder, arrays, shard: int = 1 << 30) -> None:
    """As `convert` does."""
    infos = [TensorInfo(name, array.shape, array.dtype.name) for name, array in arrays.items()]
    source = ArraySource(arrays, LLAMA)
    layout = format_.layout(infos, shard)
    with new_folder(folder) as new:
        for file, there in layout.items():
            format_.write(new, file, there, source)
        format_.finish(new, layout, source)


def assert_read_back(format_, folder, arrays) -> None:
    with format_.open(format_.detect(folder)) as reader:
        # T5X counts training steps.
        assert set(reader.tensors) - {"state/step"} == set(arrays)
        for name, array in arrays.items():
            info = TensorInfo(name, array.shape, array.dtype.name)
            expected = format_.reads_back(info, np.ascontiguousarray(array).reshape(array.shape))
            read = reader.read(name)
            assert reader.tensors[name].shape == read.shape, name
            assert reader.tensors[name].dtype == read.dtype.name, name
            assert identical(np.ascontiguousarray(read).reshape(read.shape), expected), name


@TARGETS
def test_which_element_types_are_held(format_):
    held = {dtype for dtype in DTYPES if holds(format_, dtype)}
    assert held >= (COMMON if format_.name == "GGUF" else ORDINARY)


@TARGETS
@pytest.mark.parametrize("shard", [1 << 30, 64], ids=["whole", "sharded"])
def test_every_element_type(format_, shard, tmp_path):
    arrays = {}
    for dtype in DTYPES:
        if holds(format_, dtype):
            arrays[name_in(format_, "some", dtype, "weight")] = random_bits(dtype, (7, 5))
            arrays[name_in(format_, "vector", dtype, "weight")] = random_bits(dtype, (300,), 1)
    write(format_, tmp_path / "new", arrays, shard)
    assert_read_back(format_, tmp_path / "new", arrays)


@TARGETS
def test_every_shape_and_memory(format_, tmp_path):
    base = random_bits("float32", (6, 8, 10))
    arrays = {
        "nothing": np.empty((0, 4), np.float32),
        "nothing_inside": np.empty((3, 0), np.float32),
        "scalar": np.array(np.float32(-0.0)),
        "one": base[:1, :1, 0],
        "transposed": base.transpose(2, 0, 1),
        "fortran": np.asfortranarray(base[0]),
        "backwards": base[::-1, ::2, ::-3],
        "repeated": np.broadcast_to(base[0, 0], (4, 10)),
        "offset": np.frombuffer(b"x" + base.tobytes()[:40], np.float32, 10, 1),
        "half": random_bits("bfloat16", (9, 4)).T,
    }
    arrays = {name_in(format_, "layer", name, "weight"): array for name, array in arrays.items()}
    refused = set()
    for name, array in list(arrays.items()):
        try:
            format_.layout([TensorInfo(name, array.shape, array.dtype.name)], 1 << 30)
        except CheckpointError as error:
            assert error.tensor == name
            refused.add(arrays.pop(name).shape)
    # Nothing but what has no element, or no dimension, may be beyond a format.
    assert all(0 in shape or shape == () for shape in refused)
    write(format_, tmp_path / "new", arrays)
    assert_read_back(format_, tmp_path / "new", arrays)


@TARGETS
def test_what_is_not_held_is_refused_before_anything_is_written(format_, tmp_path):
    refused = [dtype for dtype in DTYPES if not holds(format_, dtype)]
    for dtype in refused:
        with pytest.raises(CheckpointError, match=r"layer.weight"):
            write(format_, tmp_path / "new", {name_in(format_, "layer", "weight"): random_bits(dtype, (2, 3))})
        assert list(tmp_path.iterdir()) == []


@TARGETS
def test_what_was_not_announced_is_refused(format_, tmp_path):
    """A file that says one thing and holds another must not come to be."""
    name = name_in(format_, "layer", "weight")
    array = random_bits("float32", (4, 8))
    for other in (array.astype(">f4"), array.astype(np.float64), array.reshape(8, 4), array[:2]):
        info = TensorInfo(name, array.shape, "float32")
        source = ArraySource({name: other}, LLAMA)
        layout = format_.layout([info], 1 << 30)
        with pytest.raises(CheckpointError, match=r"layer.weight"), new_folder(tmp_path / "new") as folder:
            for file, there in layout.items():
                format_.write(folder, file, there, source)
        assert list(tmp_path.iterdir()) == []


@TARGETS
def test_a_full_disk_is_one_error_and_leaves_nothing(format_, tmp_path):
    """The limit on a file's size stands for the disk: what meets it may be a thread of C++ as well as Python."""
    arrays = {name_in(format_, "layer", number, "weight"): random_bits("float32", (64, 64)) for number in ("0", "1")}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"new: cannot be written: File too large$"):
            write(format_, tmp_path / "new", arrays)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
