"""The numbers of the recorded Flax cases, each a function of names and shapes alone, so that no weights are stored.

`scripts/record_flax_trees.py` and the tests load this file by path; it needs numpy and nothing else. The streams are
numpy's legacy `RandomState`, which numpy has promised never to change.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

SAMPLES = 24


def weights(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Each leaf of a tree of shapes as ("a/b/c", float32 array), in the tree's order."""
    for name, found in tree.items():
        here = f"{path}/{name}" if path else name
        if isinstance(found, Mapping):
            yield from weights(found, here)
        else:
            yield here, leaf(here, tuple(found))


def leaf(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 numbers that keep activations near 1: kernels by their fan-in, norms around 1, variances positive."""
    spread = _stream(path).uniform(-1, 1, size=shape)
    name = path.rpartition("/")[2]
    if name in ("scale", "weight_g") or (name == "weight" and len(shape) == 1):
        numbers = 1 + 0.25 * spread
    elif name == "var":
        numbers = 1 + 0.5 * spread
    elif name in ("bias", "mean"):
        numbers = 0.2 * spread
    elif name in ("kernel", "weight_v"):
        numbers = math.sqrt(3 / math.prod(shape[:-1])) * spread
    else:
        numbers = spread
    return np.asarray(numbers, np.float32)


def inputs(recipe: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The arguments of a model by name; a recipe's entry has a `shape` and a `kind`:

    ids: int64 in [`low`, `high`), the last one of each row `last` where that is given;
    mask: int64, 1 up to the row's entry in `lengths`;  bools: about one in three True;  floats: uniform in [-1, 1).
    """
    return {name: _input(name, **entry) for name, entry in recipe.items()}


def _input(
    name: str, kind: str, shape: Sequence[int], low: int = 0, high: int = 0, last: int | None = None, lengths: Any = ()
) -> np.ndarray:
    stream = _stream(name)
    if kind == "floats":
        return stream.uniform(-1, 1, size=shape).astype(np.float32)
    if kind == "bools":
        return stream.uniform(size=shape) < 1 / 3
    if kind == "mask":
        return (np.arange(shape[1])[None] < np.asarray(lengths)[:, None]).astype(np.int64)
    assert kind == "ids", kind
    ids = stream.randint(low, high, size=shape).astype(np.int64)
    if last is not None:
        ids[..., -1] = last
    return ids


def sample(name: str, output: np.ndarray, arguments: Mapping[str, np.ndarray]) -> np.ndarray:
    """Up to `SAMPLES` numbers spread evenly over the output `name` of a model called with `arguments`.

    Positions that the attention mask leaves out hold nothing defined; it says nothing of what a decoder gives.
    """
    mask = arguments.get("attention_mask")
    of_decoder = "decoder_input_ids" in arguments and not name.startswith("encoder")
    if mask is not None and not of_decoder and output.shape[: mask.ndim] == mask.shape:
        output = output[mask.astype(bool)]
    flat = np.asarray(output, np.float64).reshape(-1)
    return flat[np.unique(np.linspace(0, flat.size - 1, SAMPLES).astype(int))]


def _stream(name: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(name.encode()))
