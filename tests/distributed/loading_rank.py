"""One of two processes: models loaded over a mesh, each rank its own bytes, saved again; prints "rank r ok"."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import core_model_loading
from transformers.distributed.sharding_utils import DtensorShardOperation

import easytorch
from easytorch.bridge.formats.orbax_trees.tree import OrbaxReader
from easytorch.distributed import make_mesh
from easytorch.protocol.mesh_loading import class_over_mesh
from tests.processes import leave_group

IDS = torch.arange(4 * 9).view(4, 9) * 7 % 90


class Part:
    """safetensors' slice of a file, or a tensor, whose elements are counted as they are taken."""

    taken = 0

    def __init__(self, source: Any) -> None:
        self.source = source
        self.dtype = getattr(source, "dtype", None)

    def get_shape(self) -> list[int]:
        return list(self.source.shape) if isinstance(self.source, torch.Tensor) else self.source.get_shape()

    def __getitem__(self, key: Any) -> torch.Tensor:
        part: torch.Tensor = self.source[key]
        Part.taken += part.nbytes
        return part


@contextmanager
def counting() -> Iterator[None]:
    """Count what transformers' loader takes of a checkpoint's tensors."""
    shard, copy = DtensorShardOperation.shard_tensor, core_model_loading._materialize_copy
    Part.taken = 0
    DtensorShardOperation.shard_tensor = lambda self, source, **more: shard(self, Part(source), **more)
    core_model_loading._materialize_copy = lambda source, *more, **named: copy(Part(source), *more, **named)
    try:
        yield
    finally:
        DtensorShardOperation.shard_tensor, core_model_loading._materialize_copy = shard, copy


@contextmanager
def orbax_bytes() -> Iterator[list[int]]:
    """The sizes of the arrays, or parts of them, that are read of Orbax checkpoints."""
    taken: list[int] = []
    methods = OrbaxReader.read, OrbaxReader.read_box

    def counted(method: Any) -> Any:
        def call(*args: Any) -> Any:
            array = method(*args)
            taken.append(array.nbytes)
            return array

        return call

    OrbaxReader.read, OrbaxReader.read_box = map(counted, methods)
    try:
        yield taken
    finally:
        OrbaxReader.read, OrbaxReader.read_box = methods


def own_bytes(model: Any) -> int:
    """Of this rank's shards, and of what is replicated."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() * 4 for p in model.parameters())


def check(folder: str, axes: str, auto: Any, share: float = 0.6, **kwargs: Any) -> None:
    alone = easytorch.AutoModelForCausalLM.from_pretrained(folder)
    mesh = make_mesh(axes)
    case = (Path(folder).name, axes, kwargs)
    with counting():
        model = auto.from_pretrained(folder, mesh=mesh, **kwargs)
    assert 0 < Part.taken <= own_bytes(model), (case, Part.taken, own_bytes(model))
    assert own_bytes(model) < share * own_bytes(alone), case
    for name, parameter in model.named_parameters():
        full: Any = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(full, alone.get_parameter(name)), (case, name)
    losses = [one(input_ids=IDS, labels=IDS, use_cache=False).loss.detach() for one in (model, alone)]
    assert abs(float(losses[0] / losses[1]) - 1) < 1e-5, (case, losses)
    target = Path(folder).with_name(f"saved-{Path(folder).name}-{axes}")
    model.save_pretrained(target)
    alone_again = Path(folder).with_name(f"alone-{Path(folder).name}-{axes}")
    if dist.get_rank() == 0:
        alone.save_pretrained(alone_again)
        files = [safe_open(one / "model.safetensors", "pt") for one in (target, alone_again)]
        names = [list(file.keys()) for file in files]
        assert names[0] == names[1], case
        assert all(torch.equal(*(file.get_tensor(name) for file in files)) for name in names[0]), case
        configs = [json.loads((one / "config.json").read_text()) for one in (target, alone_again)]
        assert configs[0] == configs[1], case
    dist.barrier()


def refused(message: str, function: Callable[[], object]) -> None:
    try:
        function()
    except (ValueError, RuntimeError, OSError) as error:
        assert message in str(error), f"{error} instead of {message}"
    else:
        raise AssertionError(f"{message}: was not refused")


def main(folder: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    ours = easytorch.AutoModelForCausalLM
    check(str(folder / "llama"), "tp=2", ours)
    check(str(folder / "qwen3_moe"), "fsdp=2", ours)
    check(str(folder / "qwen3_moe"), "ep=2", ours, share=0.8)  # the experts alone are divided
    check(str(folder / "llama"), "fsdp=2", ours)
    check(str(folder / "qwen3_moe"), "pp=2", ours, share=0.8)
    check(str(folder / "flax"), "pp=2", ours, share=0.8)
    check(str(folder / "flax"), "fsdp=2", ours)
    with orbax_bytes() as taken:
        check(str(folder / "orbax"), "fsdp=2", ours)
        alone = easytorch.AutoModelForCausalLM.from_pretrained(folder / "orbax")
    # once by the rank's own part, and twice as a whole: by `alone` in `check`, and here
    assert sum(taken) <= 2.6 * sum(p.nbytes for p in alone.parameters()), taken
    check(str(folder / "olmo"), "tp=2", ours)  # transformers' own class
    mesh = make_mesh("tp=2")
    llama = str(folder / "llama")
    refused("does not go with device_map", lambda: ours.from_pretrained(llama, mesh=mesh, device_map="auto"))
    refused("partition_rules need a mesh", lambda: ours.from_pretrained(llama, partition_rules=[("q_proj", None)]))
    quantized = transformers.AutoConfig.from_pretrained(llama)
    quantized.quantization_config = {"quant_method": "gptq", "bits": 4}
    over_mesh = class_over_mesh(type(ours.from_pretrained(llama)), llama, mesh, None, {})
    refused("a mesh does not go with a quantized", lambda: over_mesh(quantized))
    model = ours.from_pretrained(llama, mesh=mesh, partition_rules=[("q_proj", None)])
    assert model.model.layers[0].self_attn.q_proj.weight.to_local().shape == (32, 32)
    # the first rank cannot write: all say so, and nobody waits for it
    (folder / "file").touch()
    words = "cannot be written: File exists (rank 0)"
    refused(words, lambda: model.save_pretrained(folder / "file" / "below"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.barrier()
    print(f"rank {dist.get_rank()} ok\n", end="", flush=True)
    leave_group()
