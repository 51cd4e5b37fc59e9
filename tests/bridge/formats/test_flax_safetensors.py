"""safetensors with Flax names, as `FlaxPreTrainedModel.save_pretrained(safe_serialization=True)` wrote them."""

import json
from pathlib import Path

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from easytorch.auto import AutoModelForSequenceClassification
from easytorch.bridge import convert, diff, inspect
from easytorch.bridge.core.array_source import ArraySource
from easytorch.bridge.core.nested import nested
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import SAFETENSORS_CODES, numpy_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.safetensors_files.flax_safetensors import FlaxSafetensors

FORM = FlaxSafetensors()


def as_transformers(folder: Path, leaves: dict[str, np.ndarray], config: Path) -> Path:
    """What transformers 4.57 does: `flatten_dict(params, sep=".")`, `save_file(..., metadata={"format": "flax"})`."""
    folder.mkdir()
    save_file(flatten_dict(nested(leaves), sep="."), folder / "model.safetensors", metadata={"format": "flax"})
    (folder / "config.json").write_bytes(config.read_bytes())
    return folder


@pytest.fixture
def published(tiny_leaves, tiny_flax, tmp_path) -> Path:
    return as_transformers(tmp_path / "published", tiny_leaves, tiny_flax / "config.json")


def test_the_same_weights_as_in_msgpack(published, tiny_flax, tiny_torch, tmp_path):
    assert inspect(published).format == "Flax safetensors"
    assert diff(published, tiny_flax).same
    convert(published, tmp_path / "out", to="torch", verify=True)
    got, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", tiny_torch))
    assert got.keys() == expected.keys()
    assert all(np.array_equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("source", ["tiny_torch", "tiny_flax"])
def test_written_as_transformers_writes_it(source, published, tmp_path, request):
    convert(request.getfixturevalue(source), tmp_path / "out", to="flax-safetensors", verify=True)
    file = tmp_path / "out" / "model.safetensors"
    got, expected = load_file(file), load_file(published / "model.safetensors")
    assert got.keys() == expected.keys()
    assert all(np.array_equal(got[name], expected[name]) for name in expected)
    with safe_open(file, framework="np") as opened:
        assert opened.metadata() == {"format": "flax"}


def test_shards(published, tiny_flax, tmp_path):
    report = convert(tiny_flax, tmp_path / "out", to="flax-safetensors", max_shard_size="2KB", verify=True)
    assert len(report.files) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(load_file(published / "model.safetensors"))
    format_, _ = registry.find(tmp_path / "out")
    assert format_.name == FORM.name
    assert diff(tmp_path / "out", published).same


@pytest.mark.parametrize("from_flax", [False, True])
def test_auto_classes_load_it(published, tiny_torch, from_flax):
    model = AutoModelForSequenceClassification.from_pretrained(published, from_flax=from_flax)
    expected = load_file(tiny_torch / "model.safetensors")
    state = model.state_dict()
    assert all(np.array_equal(state[name].numpy(), array) for name, array in expected.items())


def test_one_file(tiny_flax, published, tmp_path):
    convert(tiny_flax, tmp_path / "out.safetensors", to="flax-safetensors", verify=True)
    assert load_file(tmp_path / "out.safetensors").keys() == load_file(published / "model.safetensors").keys()


def test_every_dtype(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for dtype in SAFETENSORS_CODES:
        element = numpy_dtype(dtype)
        raw = rng.integers(0, 2 if dtype == "bool" else 256, (3, 5, element.itemsize), dtype=np.uint8)
        arrays[f"layer/{dtype}"] = raw.view(element).reshape(3, 5)
    layout = FORM.layout([TensorInfo(path, a.shape, a.dtype.name) for path, a in arrays.items()], 1 << 30)
    for file, infos in layout.items():
        FORM.write(tmp_path, file, infos, ArraySource(arrays))
    with FORM.open(FORM.detect(tmp_path)) as reader:
        assert set(reader.tensors) == set(arrays)
        for path, array in arrays.items():
            assert reader.read(path).dtype == array.dtype
            assert reader.read(path).tobytes() == array.tobytes()


def test_torch_names_are_left_to_the_other_format(tiny_torch, published):
    assert FORM.detect(tiny_torch) is None
    assert registry.find(tiny_torch)[0].name == "torch safetensors"
    assert registry.find(published)[0].name == FORM.name
    assert registry.find(published / "model.safetensors")[0].name == FORM.name


def test_paths_that_would_read_as_one(tmp_path):
    save_file(
        {"a.b": np.ones(2, np.float32), "a/b": np.ones(2, np.float32)},
        tmp_path / "model.safetensors",
        metadata={"format": "flax"},
    )
    with pytest.raises(CheckpointError, match="the same path"):
        FORM.open(FORM.detect(tmp_path))
    with pytest.raises(CheckpointError, match="dot in its path"):
        FORM.layout([TensorInfo("a.b/c", (2,), "float32")], 100)


def test_every_truncation_is_noticed(published):
    file = published / "model.safetensors"
    content = file.read_bytes()
    for length in range(0, len(content), 97):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            registry.open_reader(published)
