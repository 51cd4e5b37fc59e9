"""The parts of tensors that the devices of a torch_xla mesh hold: written to files of their own, and filled again.

The files are those of `shards.py`, one for each device as there for each rank: a mesh of processes reads them, and
those of one are read here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
    _gen_file_name,
)


def on_devices(tensors: Mapping[str, Tensor]) -> bool:
    """Whether one of the tensors is torch_xla's."""
    return any(one.device.type == "xla" for one in tensors.values())


def write_device_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write what each device holds of the tensors into a file of `folder`, synced; what several hold, once.

    Tensors of other devices are the first's. On the host there is one device's part at a time.
    """
    import torch_xla

    torch_xla.sync()  # what is pending has no parts yet
    count = torch_xla.runtime.global_runtime_device_count()
    for device in range(count):
        parts: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        for name, one in tensors.items():
            part = _part_of(one.detach(), device)
            if part is not None:
                parts[name], start = part
                offsets[name] = {SAVED_OFFSETS_KEY: start}
        if parts:
            _write(folder / _gen_file_name(1, 1, device + 1), parts, offsets)


def fill(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor of torch_xla, divided as it is, the values of one on the CPU."""
    import torch_xla
    from torch_xla.distributed.spmd import XLAShardedTensor

    tensor = tensor.detach()
    if not torch_xla._XLAC._get_xla_sharding_spec(tensor):
        with torch.no_grad():
            tensor.copy_(values)
        return
    shards = XLAShardedTensor(tensor).local_shards
    for shard in shards:
        own = values if shard.indices is Ellipsis else values[tuple(shard.indices)]
        if shard.data.shape == own.shape:
            shard.data = own.contiguous()
        else:  # a dimension that does not divide is padded
            shard.data = torch.zeros_like(shard.data)
            shard.data[tuple(slice(0, size) for size in own.shape)] = own
    XLAShardedTensor(tensor).load_local_shards_(shards)


def _part_of(tensor: Tensor, device: int) -> tuple[Tensor, list[int]] | None:
    """(the part that a device is the first to hold, on the CPU; where it begins in the tensor); None where none."""
    import torch_xla
    from torch_xla.distributed.spmd import XLAShardedTensor

    divided = tensor.device.type == "xla" and bool(torch_xla._XLAC._get_xla_sharding_spec(tensor))
    if not divided:
        return (tensor.cpu(), [0] * tensor.dim()) if device == 0 else None
    shards = XLAShardedTensor(tensor).local_shards
    found: dict[Any, int] = {}
    for number, shard in enumerate(shards):
        found.setdefault(_place(shard.indices), number)
    shard = shards[device]
    if found[_place(shard.indices)] != device:
        return None
    if shard.indices is Ellipsis:
        return shard.data.contiguous(), [0] * tensor.dim()
    inside = tuple(slice(0, one.stop - one.start) for one in shard.indices)  # without the padding
    return shard.data[inside].contiguous(), [one.start for one in shard.indices]


def _place(indices: Any) -> tuple[tuple[int, int], ...]:
    return () if indices is Ellipsis else tuple((one.start, one.stop) for one in indices)


def _write(path: Path, parts: dict[str, Tensor], offsets: dict[str, dict[str, list[int]]]) -> None:
    from safetensors.torch import save_file

    content = {
        CUSTOM_METADATA_KEY: json.dumps(offsets), DCP_VERSION_KEY: str(HF_DCP_VERSION), FORMAT_KEY: FORMAT_VALUE
    }  # fmt: skip
    save_file(parts, path, metadata=content)
    with path.open("rb") as file:
        os.fsync(file.fileno())
