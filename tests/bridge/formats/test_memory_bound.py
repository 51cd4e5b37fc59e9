"""A conversion takes memory for two tensors at most, whatever the size of the model: the kernel refuses it more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# 280 MB of float32; the largest tensors, 41 MB, are the table and the output, which Flax keeps transposed.
_PROGRAM = """
import json, resource, sys
from pathlib import Path

import numpy as np
import torch
import transformers

from easytorch.bridge.convert import convert
from easytorch.bridge.jobs import targets
from easytorch.bridge.formats.base import TensorInfo

folder = Path(sys.argv[1])
config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 16}


class Rows:
    config = None
    row = np.random.default_rng(0).normal(size=8192).astype(np.float32)

    def read(self, name):
        return np.broadcast_to(self.row[: infos[name].shape[-1]], infos[name].shape)

    def wrote(self, info):
        pass


def make(path, **sizes):
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, **sizes))
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | sizes))
    return {name: TensorInfo(name, tuple(tensor.shape), "float32") for name, tensor in made.state_dict().items()}


def write(path):
    format_ = targets.target("torch").format
    layout = format_.layout(list(infos.values()), 1 << 30)
    for file, group in layout.items():
        format_.write(path, file, group, Rows())


def chain(path):
    convert(path / "torch", path / "flax", to="flax")
    convert(path / "flax", path / "back", to="torch")
    convert(path / "flax", path / "cast", to="torch", dtype="bf16")
    convert(path / "torch", path / "cast-flax", to="flax", dtype="bf16")


def data():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))


for path, sizes in (
    (folder / "small", {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 1}),
    (folder / "large", {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 10_000, "num_hidden_layers": 3}),
):
    path.mkdir()
    with torch.device("meta"):
        infos = make(path / "torch", **sizes)
    write(path / "torch")
    if path.name == "large":
        largest = max(info.nbytes for info in infos.values())
        total = sum(info.nbytes for info in infos.values())
        # Besides: the threads' stacks and buffers, which are the same for any model.
        room = 2 * largest + (32 << 20)
        assert 2 * room < total
        limit = data() + room
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            np.empty(2 * room, np.uint8)
        except MemoryError:
            pass
        else:
            sys.exit("this kernel lets a process pass its limit")
    chain(path)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux counts memory so")
def test_two_tensors_are_enough(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, tmp_path]
    subprocess.run(command, cwd=ROOT, timeout=600, check=True)
