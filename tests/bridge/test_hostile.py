"""Damaged files, every reader: a CheckpointError or a checkpoint that is whole; never another error or a hang."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry
from easytorch.bridge.save_tree import save_tree

STATE = {
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.tensor(True),
}


def _pickle(folder):
    torch.save(STATE, folder / "pytorch_model.bin")


def _old_pickle(folder):
    torch.save(STATE, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def _safetensors(folder):
    save_file(STATE, folder / "model.safetensors", metadata={"format": "pt"})


def _msgpack(folder):
    tree = {"a": {"kernel": STATE["a.weight"].numpy(), "step": STATE["c"].numpy()}, "b": STATE["a.weight"].numpy()[:2]}
    save_tree(tree, folder / "flax")
    (folder / "flax" / "flax_model.msgpack").rename(folder / "flax_model.msgpack")
    (folder / "flax").rmdir()


@pytest.fixture(
    scope="module", params=[_safetensors, _msgpack, _pickle, _old_pickle], ids=lambda write: write.__name__[1:]
)
def original(request, tmp_path_factory):
    """A whole file of each format: its name and its bytes."""
    folder = tmp_path_factory.mktemp("original")
    request.param(folder)
    (file,) = folder.iterdir()
    return file.name, file.read_bytes()


def read_all(name: str, content: bytes) -> None:
    """Opens and reads everything; anything but success and CheckpointError fails the test."""
    with TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(content)
        try:
            _, reader = registry.open_checkpoint(Path(folder))
        except CheckpointError as error:
            assert name in str(error)
            assert "\n" not in str(error)
            return
        with reader:
            for info in reader.tensors.values():
                array = reader.read(info.name)
                assert (array.shape, array.dtype.name, array.nbytes) == (info.shape, info.dtype, info.nbytes)
                array.sum(dtype=bool)


fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(data=st.data())
def test_bits_flipped(original, data):
    name, content = original
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        damaged[position] ^= data.draw(st.integers(1, 255))
    read_all(name, bytes(damaged))


@fuzz
@given(data=st.data())
def test_cut_and_spliced(original, data):
    name, content = original
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(0, len(content)))
    read_all(name, content[:start] + data.draw(st.binary(max_size=12)) + content[end:])


@fuzz
@given(content=st.binary(max_size=200))
@example(content=b"\x81" * 200)
@example(content=b"\xdf\xff\xff\xff\xff" * 20)
def test_noise(content):
    for name in (
        "model.safetensors",
        "flax_model.msgpack",
        "model.safetensors.index.json",
        "flax_model.msgpack.index.json",
    ):
        read_all(name, content)


def test_every_truncation_is_noticed(original, tmp_path):
    name, content = original
    if name == "pytorch_model.bin":
        pytest.skip("torch reads its own format, which tolerates a missing trailer")
    for length in range(len(content)):
        (tmp_path / name).write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            registry.open_checkpoint(tmp_path)
