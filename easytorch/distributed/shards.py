"""Tensors of a mesh as safetensors that each rank writes its own part of, by torch.distributed.checkpoint.

The files are those of `HuggingFaceStorageWriter`: `shard-<rank>-model-<n>-of-<m>.safetensors`, with the place of each
part in the full tensor. Nothing in them is pickled; transformers and `easytorch convert` read the model in them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from easytorch.distributed import xla_shards

PATTERN = "shard-*.safetensors"
# A rank serializes one file at a time in memory.
_LARGEST_FILE = 2 << 30
_ALONE = "torch.distributed is disabled"  # the beginning of a warning


class ShardsFailedError(RuntimeError):
    """Shards could not be written or read. causes: rank -> its error; the same in every rank."""

    def __init__(self, causes: Mapping[int, BaseException]) -> None:
        self.causes = dict(causes)
        rank = min(self.causes)
        super().__init__(f"rank {rank}: {self.causes[rank]}")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a sharded model, its parameters themselves; a tied weight by each of its names.

    FSDP2 frees what an evaluation has left gathered when it is asked for a state dict.
    """
    return {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}


def save_shards(
    tensors: Mapping[str, Tensor],
    folder: Path,
    finish: Callable[[], None],
    *,
    group: Any = None,
    in_background: bool = False,
    stager: Stager | None = None,
) -> Future[Any] | None:
    """Write each rank's part of the tensors into `folder`, synced. Each rank of `group` calls this.

    finish: called by the first rank when every rank has written, before this returns in any of them; its error is
    everyone's. in_background: copy the tensors to the CPU, and write them while training goes on; returns a future to
    give to `result_of`. group: of a CPU backend. stager: keeps the memory of the copies for the next save in the
    background, which must not begin before this one is done. Of tensors over a mesh of torch_xla the one process writes
    a file for each device, never in the background.
    Raises `ShardsFailedError` in every rank.
    """
    if xla_shards.on_devices(tensors):
        assert not in_background, "one process writes what all devices hold"
        try:
            xla_shards.write_device_shards(tensors, folder)
            finish()
        except (OSError, SafetensorError) as error:
            raise ShardsFailedError({0: error}) from None
        return None
    # ranks with strided shards communicate here, so before a thread does
    state, seen = {}, set()
    for name, one in tensors.items():
        state[name] = _rectangular(one)
        local = _local(state[name])
        if local.numel() and local.data_ptr() in seen and not in_background:  # whose stager does
            state[name] = state[name].clone()  # safetensors refuses two names of one memory
        seen.add(local.data_ptr())
    stager = (stager or Stager()) if in_background else None
    writer = _Writer(folder, _merged(_files(state), group), finish, stager)
    # that there is no process group is what a single process wants; the filter is for a thread too
    warnings.filterwarnings("ignore", message=_ALONE)
    if in_background:
        begun: Any = dcp.async_save(state, storage_writer=writer, process_group=group, async_stager=stager)
        future: Future[Any] = getattr(begun, "upload_completion", begun)
        return future
    try:
        dcp.save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise _failed(error) from None
    return None


def result_of(future: Future[Any]) -> None:
    """Wait until a save in the background is done. Raises `ShardsFailedError` in every rank."""
    try:
        future.result()
    except CheckpointException as error:
        raise _failed(error) from None


def saved_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> shape, dtype and parts of each tensor in the shards of `folder`, read off the files' headers.

    `ValueError` for one of which a part is missing.
    """
    found = _Reader(folder).read_metadata().state_dict_metadata
    tensors = {name: one for name, one in found.items() if isinstance(one, TensorStorageMetadata)}
    for name, one in tensors.items():
        stored = sum(math.prod(part.sizes) for part in one.chunks)
        if stored != math.prod(one.size):
            raise ValueError(f"{stored} of {math.prod(one.size)} values of {name} are there: a shard file is missing")
    return tensors


def load_shards(tensors: Mapping[str, Tensor], folder: Path, *, group: Any = None) -> None:
    """Fill the tensors, sharded as they are, from shards of any mesh; each rank reads its own part.

    `ShardsFailedError` in every rank where a name or a shape is another, or a file is damaged.
    """
    targets = {}
    for name, one in tensors.items():
        plain = _placements(one)
        if one.device.type == "xla":
            targets[name] = torch.empty(one.shape, dtype=one.dtype)
        else:
            targets[name] = one.detach() if plain is None else _empty_like(one, plain)
    warnings.filterwarnings("ignore", message=_ALONE)
    with torch.no_grad():
        try:
            dcp.load(dict(targets), storage_reader=_Reader(folder), process_group=group)
        except CheckpointException as error:
            raise _failed(error) from None
        for name, one in tensors.items():
            if one.device.type == "xla":
                xla_shards.fill(one, targets.pop(name))
            elif isinstance(one, DTensor) and _placements(one) is not None:
                one.detach().copy_(targets[name].redistribute(placements=one.placements))  # type: ignore[attr-defined]


class Stager(BlockingAsyncStager):
    """Copies tensors to the CPU, into the memory of the copies before where they are as large.

    torch's own keeps it too, but as pinned memory, which there is with a GPU alone. A weight of several names is copied
    once while training waits; `copy_tied` gives each name memory of its own, as safetensors asks for.

    constant: the names of tensors on the CPU that do not change until `wait_for_copies` returns: they are copied in a
    thread. All others are copied when a save begins.
    """

    constant: Container[str] = ()
    shapes: dict[str, Any] | None = None
    tied: Mapping[str, str] = MappingProxyType({})  # the other names of a tensor -> its first
    _copying: Future[dict[str, Any]] | None = None

    def stage(  # type: ignore[override]  # a future too, as torch's AsyncStager allows
        self, state_dict: dict[str, Any]
    ) -> dict[str, Any] | Future[dict[str, Any]]:
        shapes = {name: (_local(one).shape, one.dtype) for name, one in state_dict.items()}
        if self.state_dict_cache is None or shapes != self.shapes:
            self.state_dict_cache, self.shapes = _create_cpu_state_dict(state_dict), shapes
        kept, first = self.state_dict_cache, dict[Any, str]()
        names = {name: first.setdefault(_memory(one) or name, name) for name, one in state_dict.items()}
        self.tied = {name: other for name, other in names.items() if name != other}
        later = [name for name in names if name not in self.tied and name in self.constant]
        at_once = [name for name in names if name not in self.tied and name not in self.constant]

        def copy(names: list[str]) -> dict[str, Any]:
            _copy_state_dict({name: state_dict[name] for name in names}, {name: kept[name] for name in names})
            return dict(kept)

        staged = copy(at_once)
        if not later:
            return staged
        threads = ThreadPoolExecutor(1)
        self._copying = threads.submit(copy, later)
        threads.shutdown(wait=False)
        return self._copying

    def wait_for_copies(self) -> None:
        """Wait for the thread that copies, if there is one; its error is that of the save."""
        if self._copying is not None:
            wait([self._copying])
            self._copying = None

    def copy_tied(self) -> None:
        """The rest of `stage`, in the thread that writes."""
        kept = self.state_dict_cache or {}
        for name, first in self.tied.items():
            _local(kept[name]).copy_(_local(kept[first]))


class _Writer(HuggingFaceStorageWriter):
    def __init__(
        self, folder: Path, files: dict[str, int], finish: Callable[[], None], stager: Stager | None = None
    ) -> None:
        super().__init__(str(folder), files, save_distributed=True)
        self._finish, self._stager = finish, stager

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        if self._stager is not None:
            self._stager.copy_tied()
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        self._finish()


class _ShardFiles(FileSystem):
    """Those in a folder where the full model may stand beside the shards."""

    def ls(self, path: Any) -> list[str]:
        return sorted(map(str, Path(path).glob(PATTERN)))


class _Reader(HuggingFaceStorageReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.fs = _ShardFiles()


def _rectangular(tensor: Tensor) -> Tensor:
    """The tensor with shards that are each one block of it, the only ones that torch's checkpoints describe.

    Gate and up projection in one tensor are sharded each by itself, so that a rank's shard is two blocks.
    """
    placements = _placements(tensor)
    if placements is None:
        return tensor.detach()
    result: Tensor = tensor.detach().redistribute(placements=placements)  # type: ignore[attr-defined]
    return result


def _placements(tensor: Tensor) -> tuple[Any, ...] | None:
    """The placements in which a rank holds one block of the tensor; None where it does already."""
    if not isinstance(tensor, DTensor):
        return None
    strided = [one for one in tensor.placements if isinstance(one, _StridedShard)]
    for one in strided:
        # FSDP over tensor parallelism: strided because the other axis divides the dimension before this one
        ahead = math.prod(
            size
            for size, other in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
            if other is not one and getattr(other, "dim", None) == one.dim
        )
        if one.split_factor != ahead:
            return tuple(Shard(one.dim) if isinstance(one, _StridedShard) else one for one in tensor.placements)
    return None


def _memory(tensor: Tensor) -> tuple[Any, ...] | None:
    """The same for two tensors that lie in the same numbers; None for one without numbers."""
    one = _local(tensor)
    return (one.device, one.data_ptr(), one.dtype, one.shape, one.stride()) if one.numel() else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _empty_like(tensor: Tensor, placements: tuple[Any, ...]) -> Tensor:
    from torch.distributed.tensor import empty

    assert isinstance(tensor, DTensor)
    return empty(tensor.shape, dtype=tensor.dtype, device_mesh=tensor.device_mesh, placements=placements)


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Name -> the number of its file, of which each rank writes its part; none is larger than the limit, if it can."""
    number, filled, found = 1, 0, {}
    for name, one in tensors.items():
        taken = _local(one).nbytes
        if filled and filled + taken > _LARGEST_FILE:
            number, filled = number + 1, 0
        found[name] = number
        filled += taken
    return found


def _merged(files: dict[str, int], group: Any) -> dict[str, int]:
    """In the first rank, which plans the save, the files of all ranks' tensors: a stage of a pipeline has its own."""
    if group is None:
        return files
    first = dist.get_rank(group) == 0
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object(files, found if first else None, group=group, group_dst=0)
    return {name: number for one in found for name, number in one.items()} if first else files


def _failed(error: CheckpointException) -> ShardsFailedError:
    return ShardsFailedError({rank: cause for rank, (cause, _) in error.failures.items()})
