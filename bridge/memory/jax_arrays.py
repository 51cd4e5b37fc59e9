"""jax arrays and torch tensors that share memory, or are copied once: shard by shard, directly into the target layout.

Both are viewed as numpy arrays: transforms give strided views of those, so that a transposed weight needs no memory of
its own either. jax is imported where it is used: nothing here needs it before it receives a jax array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.bridge.core.blocks import contiguous
from easytorch.bridge.dtypes import to_numpy
from easytorch.bridge.errors import CheckpointError

if TYPE_CHECKING:
    import jax
    import torch

# One slice per dimension.
Region = tuple[slice, ...]

_WIDE = frozenset(("int64", "uint64", "float64", "complex128"))


def is_jax(leaf: object) -> bool:
    """Whether `leaf` is a jax array; does not import jax."""
    return type(leaf).__module__.partition(".")[0] in ("jax", "jaxlib") and hasattr(leaf, "addressable_shards")


def is_sharded(leaf: object) -> bool:
    """Whether `leaf` is a jax array of which no device holds all elements."""
    return is_jax(leaf) and not leaf.is_fully_replicated  # type: ignore[attr-defined]


def host(leaf: Any, path: str = "") -> np.ndarray:
    """The elements as a numpy array: a view of CPU memory, read-only for jax; a sharded array is assembled, once."""
    if is_jax(leaf):
        if is_sharded(leaf):
            assembled = empty(leaf.shape, leaf.dtype)
            fill(assembled, whole(leaf.shape), leaf, path)
            return assembled
        return np.asarray(leaf.addressable_shards[0].data)
    return to_numpy(leaf) if hasattr(leaf, "resolve_conj") else np.asarray(leaf)


def fill(target: np.ndarray, region: Region, leaf: Any, path: str = "") -> None:
    """Copies `region` of `leaf` into `target`, which has the region's shape and any strides: every element once.

    `CheckpointError` where another process holds a part of it.
    """
    done = 0
    for index, data in _shards(leaf):
        common = tuple(_common(one, other) for one, other in zip(index, region, strict=True))
        if all(part.start < part.stop for part in common):
            there = tuple(_moved(part, place.start) for part, place in zip(common, region, strict=True))
            here = tuple(_moved(part, place.start) for part, place in zip(common, index, strict=True))
            target[there] = np.asarray(data)[here]
            done += math.prod(part.stop - part.start for part in common)
    if done != target.size:
        message = f"{target.size - done} of its {target.size} elements are on the devices of other processes; gather it"
        raise CheckpointError(f"{message} with jax.experimental.multihost_utils.process_allgather", tensor=path)


def share(leaf: Any, view: np.ndarray) -> torch.Tensor | None:
    """A tensor that shares memory with `view`, a view of `host(leaf)`; None where torch cannot (dtype, alignment).

    It keeps the memory alive. jax assumes that its arrays are immutable; writing into the tensor changes the array.
    """
    import torch

    if not is_jax(leaf):
        return from_numpy(view) if view.flags.writeable else None
    array = leaf.addressable_shards[0].data if not is_sharded(leaf) else None
    if array is None or not _on_cpu(array) or not isinstance(getattr(torch, view.dtype.name, None), torch.dtype):
        return None
    base, start = torch.from_dlpack(array), np.asarray(array).ctypes.data
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    offset = view.ctypes.data - start
    if not view.size or base.data_ptr() != start or not 0 <= offset <= offset + last < array.nbytes:
        return None
    strides = [stride // view.itemsize for stride in view.strides]
    return base.as_strided(view.shape, strides, offset // view.itemsize)


def from_numpy(view: np.ndarray) -> torch.Tensor:
    """A tensor over the memory of a writable array with any strides, of any element type torch has."""
    import torch

    own = getattr(torch, view.dtype.name)
    if view.dtype.type.__module__ == "numpy":
        return torch.from_numpy(view)
    return torch.from_numpy(view.view({1: np.uint8, 2: np.int16}[view.itemsize])).view(own)


def to_jax(array: np.ndarray, path: str, *, sharding: Any = None, copy: bool = True) -> jax.Array:
    """A numpy view, of a torch tensor's memory for one, as a jax array: on jax's default device, or as `sharding` says.

    A sharded one is split on the host, so that each device receives only its part. Without `copy` a CPU array shares
    the memory where jax can (64-byte alignment, a dense block in any order of dimensions), and writing into the tensor
    later changes the array, which jax assumes to be immutable.
    `CheckpointError` for a dtype jax would narrow: it does so silently unless `jax_enable_x64` is set.
    """
    import jax

    if array.dtype.name in _WIDE and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise CheckpointError(f"jax would narrow {array.dtype} to 32 bits; cast it, or set jax_enable_x64", tensor=path)
    if sharding is not None:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: copied(array[index]))
    if not copy and _dense(array) and array.flags.writeable and jax.default_backend() == "cpu":
        made: jax.Array = jax.dlpack.from_dlpack(from_numpy(array))
    else:
        made = jax.device_put(copied(array))  # a copy: jax may read a numpy array after the call
    return made


def copied(view: np.ndarray) -> np.ndarray:
    """A copy in C order, in memory that both torch and jax can share."""
    return contiguous(view, empty(view.shape, view.dtype))


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """New memory from torch, aligned to 64 bytes; numpy aligns to 16, and jax would then copy."""
    import torch

    own = getattr(torch, dtype.name, None)
    return to_numpy(torch.empty(shape, dtype=own)) if isinstance(own, torch.dtype) else np.empty(shape, dtype)


def whole(shape: tuple[int, ...]) -> Region:
    """The region of a whole array."""
    return tuple(slice(0, size) for size in shape)


def _shards(leaf: Any) -> Iterator[tuple[Region, Any]]:
    """The shards of a leaf on this process, each once, and their regions."""
    if not is_jax(leaf):
        yield whole(leaf.shape), host(leaf)
        return
    seen = set()
    for shard in leaf.addressable_shards:
        index = tuple(slice(*part.indices(size)[:2]) for part, size in zip(shard.index, leaf.shape, strict=True))
        key = tuple((part.start, part.stop) for part in index)
        if key not in seen:
            seen.add(key)
            yield index, shard.data


def _common(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def _moved(part: slice, origin: int) -> slice:
    return slice(part.start - origin, part.stop - origin)


def _on_cpu(array: Any) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


def _dense(array: np.ndarray) -> bool:
    """Whether the array is a block of memory without holes or repeats, whatever the order of its dimensions."""
    step = array.itemsize
    for size, stride in sorted(zip(array.shape, array.strides, strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride != step:
            return False
        step *= size
    return array.size > 0
