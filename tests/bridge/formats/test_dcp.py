"""torch.distributed.checkpoint folders, against torch's own reader and writer."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from easytorch.bridge import convert
from easytorch.bridge.core.array_source import ArraySource
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import SAFETENSORS_CODES, numpy_dtype, to_numpy, to_torch
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.torch_files.dcp_metadata import Piece, Saved, check_whole
from easytorch.bridge.formats.torch_files.torch_dcp import TorchDcp

ROOT = Path(__file__).resolve().parents[3]
FORM = TorchDcp()
ODD = 13


def every_dtype() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {}
    for dtype in SAFETENSORS_CODES:
        element = numpy_dtype(dtype)
        raw = rng.integers(0, 2 if dtype == "bool" else 256, (3, 5, element.itemsize), dtype=np.uint8)
        made[f"layer.{dtype}"] = raw.view(element).reshape(3, 5)
    turned = np.arange(12, dtype=np.float32).reshape(3, 4).T
    return made | {"turned": turned, "empty": np.zeros((0, 4), np.float16), "scalar": np.array(7, np.int64)}


def write(folder: Path, arrays: dict[str, np.ndarray], max_shard_size: int = 1 << 30) -> Path:
    folder.mkdir()
    layout = FORM.layout([TensorInfo(name, a.shape, a.dtype.name) for name, a in arrays.items()], max_shard_size)
    for file, infos in layout.items():
        FORM.write(folder, file, infos, ArraySource(arrays))
    FORM.finish(folder, layout, ArraySource(arrays))
    return folder


def read(folder: Path) -> dict[str, np.ndarray]:
    with FORM.open(FORM.detect(folder)) as reader:
        return {name: np.array(reader.read(name)) for name in reader.tensors}


def same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("max_shard_size", [1 << 30, 64], ids=["one file", "many files"])
def test_written_is_read_by_torch(tmp_path, max_shard_size):
    arrays = every_dtype()
    folder = write(tmp_path / "dcp", arrays, max_shard_size)
    same(read(folder), arrays)
    state = {name: torch.empty(a.shape, dtype=getattr(torch, a.dtype.name)) for name, a in arrays.items()}
    dcp.load(state, checkpoint_id=folder)
    same({name: to_numpy(tensor) for name, tensor in state.items()}, arrays)
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    same({name: to_numpy(tensor) for name, tensor in state.items()}, arrays)


def test_what_torch_writes_is_read_in_place(tmp_path):
    arrays = every_dtype()
    state = {name: to_torch(array) for name, array in arrays.items()}
    state["turned"] = state["turned"].clone().T.contiguous().T
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    same(read(tmp_path / "dcp"), arrays)
    with FORM.open(FORM.detect(tmp_path / "dcp")) as reader:
        assert not reader.read("layer.float32").flags.owndata


def test_only_the_model_of_a_training_state_is_read(tmp_path):
    state = {
        "app": {
            "model": {"model.embed.weight": torch.ones(3, 2), "_orig_mod.head.weight": torch.zeros(2)},
            "optim": {"state": {"0": {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]},
        },
        "step": torch.tensor(3),
        "ema": {"model.embed.weight": torch.zeros(3, 2)},
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    with FORM.open(FORM.detect(tmp_path / "dcp")) as reader:
        assert set(reader.tensors) == {"model.embed.weight", "head.weight"}
        assert (reader.read("model.embed.weight") == 1).all()
        assert set(reader.left_out) == {
            "optim/state/0/exp_avg",
            "optim/param_groups/0/lr",
            "step",
            "ema/model.embed.weight",
        }


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """What two FSDP processes saved; the odd size makes pieces of unequal length."""
    folder = tmp_path_factory.mktemp("trained")
    config = {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "hidden_size": 8,
        "intermediate_size": ODD,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 21,
        "max_position_embeddings": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = Path(__file__).with_name("dcp_run.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, script, folder], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("saved", ["dcp", "safetensors"])
def test_sharded_over_two_processes(trained, tmp_path, saved):
    expected = {name: to_numpy(tensor) for name, tensor in torch.load(trained / "whole.pt").items()}
    same(read(trained / saved), expected)
    report = convert(trained / saved, tmp_path / "hf", to="torch", config=trained, verify=True)
    assert any("optim" in note for note in report.notes) == (saved == "dcp")
    convert(trained / saved, tmp_path / "flax", to="flax", config=trained, verify=True)
    convert(tmp_path / "flax", tmp_path / "back", to="dcp", verify=True)
    same(read(tmp_path / "back"), expected)
    from safetensors.numpy import load_file

    same(load_file(tmp_path / "hf" / "model.safetensors"), expected)


def test_a_missing_rank_is_noticed(trained, tmp_path):
    import shutil

    shutil.copytree(trained / "dcp", tmp_path / "dcp")
    (tmp_path / "dcp" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0.*missing"):
        FORM.open(FORM.detect(tmp_path / "dcp"))
    shutil.copytree(trained / "safetensors", tmp_path / "safetensors")
    next((tmp_path / "safetensors").glob("shard-00001-*")).unlink()
    with pytest.raises(CheckpointError, match="a rank's file is missing"):
        FORM.open(FORM.detect(tmp_path / "safetensors"))


@pytest.mark.parametrize(
    "pieces",
    [
        [((0, 0), (2, 3))],
        [((0, 0), (4, 2)), ((0, 1), (4, 1))],
        [((0, 0), (4, 3)), ((0, 0), (4, 0)), ((1, 1), (1, 1))],
        [((0, 0), (4, 4))],
        [((0,), (12,))],
        [((0, 0), (2, 3)), ((4, 0), (2, 3))],
        [((0, 0), (4, 1)), ((0, 2), (4, 2))],
        [((3, 0), (4, 3))],
    ],
)
def test_pieces_that_do_not_fill_the_tensor(pieces):
    saved = Saved((4, 3), "float32", ("w",), [Piece(offsets, sizes, "f", 0, 0) for offsets, sizes in pieces])
    with pytest.raises(CheckpointError, match="piece"):
        check_whole(saved, "w", Path("x"))


class _Hostile:
    def __reduce__(self):
        return os.system, ("touch ran",)


class _Attribute:
    """The call comes by way of an allowed class."""

    def __reduce__(self):
        return getattr, (torch.Size, "mro")


@pytest.mark.parametrize("hostile", [_Hostile(), {"state_dict_metadata": _Attribute()}, [_Hostile()]])
def test_pickles_that_call_anything_are_refused(tmp_path, monkeypatch, hostile):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "dcp", {"w": np.ones(3, np.float32)})
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(hostile))
    with pytest.raises(CheckpointError, match="can run code"):
        FORM.open(FORM.detect(tmp_path / "dcp"))
    assert not (tmp_path / "ran").exists()


def test_a_hostile_item_is_refused(tmp_path):
    folder = write(tmp_path / "dcp", {"w": np.ones(3, np.float32)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    torch.save(_Hostile(), folder / "__0_0.distcp")
    ((index, info),) = metadata.storage_data.items()
    length = (folder / "__0_0.distcp").stat().st_size
    metadata.storage_data[index] = type(info)(info.relative_path, 0, length)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="can run code"):
        read(folder)


@pytest.mark.parametrize("key", [(), ((),) * 3, 1.5])
def test_keys_that_take_forever_to_hash_are_refused(tmp_path, key):
    folder = write(tmp_path / "dcp", {"w": np.ones(3, np.float32)})
    (folder / ".metadata").write_bytes(pickle.dumps({key: 1}))
    with pytest.raises(CheckpointError):
        FORM.open(FORM.detect(folder))


@pytest.mark.parametrize("path", ["../w.distcp", "/etc/passwd", "a/b", ""])
def test_a_path_out_of_the_folder_is_refused(tmp_path, path):
    folder = write(tmp_path / "dcp", {"w": np.ones(3, np.float32)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="plain file name"):
        FORM.open(FORM.detect(folder))


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [("offset", -1, "stands at -1"), ("length", -8, "takes -8 bytes"), ("offset", 1.0, "stands at 1.0"),
     ("offset", True, "stands at True"), ("transform_descriptors", ["zstd"], "stored through")],
)  # fmt: skip
def test_a_place_that_is_none_is_refused(tmp_path, field, value, match):
    folder = write(tmp_path / "dcp", {"w": np.ones(3, np.float32)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        setattr(info, field, value)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=match):
        FORM.open(FORM.detect(folder))


def test_damaged_anywhere(tmp_path):
    """Every truncation and flipped byte: a CheckpointError or the whole array."""
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    folder = write(tmp_path / "dcp", arrays)
    rng = np.random.default_rng(0)
    for file in (folder / ".metadata", folder / "__0_0.distcp"):
        content = file.read_bytes()
        damaged = [content[:length] for length in range(0, len(content), 17)]
        for _ in range(300):
            flipped = bytearray(content)
            flipped[rng.integers(len(content))] ^= int(rng.integers(1, 256))
            damaged.append(bytes(flipped))
        for one in damaged:
            file.write_bytes(one)
            try:
                got = read(folder)
            except CheckpointError as error:
                assert "\n" not in str(error)
            else:
                assert all(array.nbytes < 1000 for array in got.values())
        file.write_bytes(content)
    same(read(folder), arrays)
