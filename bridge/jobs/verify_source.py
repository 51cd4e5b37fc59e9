"""`convert --verify`: looks up every tensor of the source in the result, under its torch name.

The result is opened like any checkpoint and converted back to torch's names, so that this finds tensors that the plan
dropped as well as those that the disk lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from easytorch.bridge.checkpoint import Checkpoint, NamedWeights, open_checkpoint
from easytorch.bridge.core.compare import identical
from easytorch.bridge.core.config import Config
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.dtypes import FLOATING, numpy_dtype
from easytorch.bridge.formats.torch_buffers import TorchBuffers
from easytorch.bridge.schemes.registry import TORCH

# Of factors and offsets that some layouts compute with, and of formats that round (blocks of eight bits).
_COMPUTED, _ROUNDED = 2.0**-21, 2.0**-5


def lost_tensor(
    checkpoint: Checkpoint, named: NamedWeights, written: Path, scheme: str, *, cast: str | None, rounds: bool,
    whole: bool,
) -> str | None:  # fmt: skip
    """A tensor of `checkpoint` that the checkpoint `written` under `scheme` does not give back, and how it is lost.

    cast: the dtype that floating point weights were cast to. rounds: the format stores another dtype than given.
    whole: the tensors that the scheme cannot hold were kept beside.
    """
    if checkpoint.scheme == scheme:
        # `verify.wrong_tensor` has compared the very same names.
        return _lost_beside(checkpoint, named, written) if whole else None
    content = checkpoint.needed_config.content if named.config is None else named.config
    config = Config(checkpoint.needed_config.file, content)
    given = checkpoint.torch_reader
    with open_checkpoint(written, scheme=None if scheme == TORCH else scheme, config=config) as back:
        found = back.in_scheme(TORCH).reader
        places = _places(checkpoint, given, found)
        tolerance = _ROUNDED if rounds else _COMPUTED if cast is None else 4 * float(ml_dtypes.finfo(cast).eps)
        for name in given.tensors:
            if name in named.kept.values() and not whole:
                continue
            array = _cast(given.read(name), cast)
            place = places.get(name)
            if place is not None:
                if not _same(array, found.read(place), tolerance, rounds):
                    return f"{name!r} comes back with other values"
            elif not _repeated(array, name, checkpoint, named, found, tolerance, rounds):
                return f"{name!r} does not come back"
    return None


def _lost_beside(checkpoint: Checkpoint, named: NamedWeights, written: Path) -> str | None:
    """A tensor that should be kept beside the weights and is missing or changed."""
    buffers = TorchBuffers.beside(written)
    if buffers is None:
        return next((f"{name!r} does not come back" for name in named.kept), None)
    with buffers:
        for name, given in named.kept.items():
            if name not in buffers.tensors or not identical(checkpoint.read_torch(given), buffers.read(name)):
                return f"{name!r} does not come back"
    return None


def _places(checkpoint: Checkpoint, given: Reader, found: Reader) -> dict[str, str]:
    """The names of `given` -> those of `found`, which may be spelt newer or with the base model's name before them."""
    architecture = checkpoint.architecture
    base = f"{architecture.base}."
    newer = architecture.names.aliases(given.tensors)
    there = {name.removeprefix(base): name for name in found.tensors}
    places = {}
    for name in given.tensors:
        tried = (name, newer.get(name, name), _modern(name))
        place = next((there[one.removeprefix(base)] for one in tried if one.removeprefix(base) in there), None)
        if place is not None:
            places[name] = name if name in found.tensors else place
    return places


def _modern(name: str) -> str:
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _repeated(
    array: np.ndarray,
    name: str,
    checkpoint: Checkpoint,
    named: NamedWeights,
    found: Reader,
    tolerance: float,
    rounds: bool,
) -> bool:
    """Whether a tied weight that is absent is there as one of the others."""
    names = checkpoint.architecture.names
    tied = {names.hub_name(one) for pair in names.ties.items() for one in pair}
    if name not in tied and name not in named.tied:
        return False
    alike: Iterable[str] = (one for one, info in found.tensors.items() if info.shape == array.shape)
    return any(_same(array, found.read(one), tolerance, rounds) for one in alike)


def _cast(array: np.ndarray, dtype: str | None) -> np.ndarray:
    return array if dtype is None or array.dtype.name not in FLOATING else array.astype(numpy_dtype(dtype))


def _same(one: np.ndarray, other: np.ndarray, tolerance: float, rounds: bool) -> bool:
    """Whether two arrays are bit-equal or, if floating point, within the rounding of the layout's arithmetic."""
    if identical(one, other):
        return True
    floating = one.dtype.name in FLOATING and other.dtype.name in FLOATING
    if one.shape != other.shape or not floating or (one.dtype != other.dtype and not rounds):
        return False
    first, second = one.astype(np.float64), other.astype(np.float64)
    finite = np.abs(first[np.isfinite(first)])
    limit = tolerance * max(1.0, finite.max(initial=0.0))
    return bool(np.allclose(first, second, rtol=0.0, atol=limit, equal_nan=True))
