"""The parameters in a tree that holds more or wraps them: training states, flax's collections, nnx's variables.

Every tree format is opened through this, so that naming schemes see the parameters' own paths:

    params/...  params/params/...  state/params/...  target/...  model/... beside an optimizer
    .../value   where every leaf ends so, as in an `nnx.State`

What stands beside the parameters (`opt_state`, `step`, random number generators) is left out, and reported.
flax's `batch_stats` belong to the parameters: where they are, both collections keep their names.
"""

from __future__ import annotations

from collections.abc import Mapping

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Reader, TensorInfo
from easytorch.bridge.formats.renamed import RenamedReader

_BATCH_STATS = "batch_stats"
# What training states keep beside the model; a model of its own is never called so.
_TRAINING = frozenset(
    ("opt_state", "optimizer", "optimizer_state", "opt", "step", "tx", "rng", "rngs", "ema", "ema_params", "train_iter")
)
# Names that wrap the parameters wherever they stand, and names that do beside a training state or as its inner tree.
_WRAPPERS = ("params",)
_WRAPPERS_IN_TRAINING = ("model", "target", "state", "train_state", "graphstate", "optimizer", "opt")
_VARIABLES = ("value", ".value", "raw_value")


def unwrapped(tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Parameter path -> its name in `tensors`, in their order, and the names left out."""
    names = [(name.split("/"), name) for name in tensors]
    while (key := _wrapper([path for path, _ in names])) is not None:
        names = [(path[1:], name) for path, name in names if path[0] == key and len(path) > 1]
    if all(path[-1] in _VARIABLES and len(path) > 1 for path, _ in names):
        names = [(path[:-1], name) for path, name in names if "rngs" not in path]
    found: dict[str, str] = {}
    for path, name in names:
        if found.setdefault("/".join(path), name) != name:
            raise CheckpointError(f"and {found['/'.join(path)]!r} are one parameter; remove one", tensor=name)
    left = set(tensors).difference(found.values())
    return found, tuple(name for name in tensors if name in left)


def _wrapper(paths: list[list[str]]) -> str | None:
    """The key at the root that the parameters stand under, or None where they stand at the root."""
    branches = {path[0] for path in paths if len(path) > 1}
    roots = {path[0] for path in paths}
    if _BATCH_STATS in roots:
        return None
    for key in _WRAPPERS:
        if key in branches:
            return key
    for key in _WRAPPERS_IN_TRAINING:
        others = roots - {key}
        inner = {path[1] for path in paths if path[0] == key and len(path) > 1}
        # "model" alone is also what HF calls the base of a language model.
        if key in branches and ((others and others <= _TRAINING | {"state"}) or "params" in inner or "target" in inner):
            return key
    return None


class UnwrappedReader(RenamedReader):
    """The parameters of an open tree under their own paths. `left_out` are the names of everything else."""

    def __init__(self, reader: Reader, *, as_stored: bool = False) -> None:
        """as_stored: under the names they have in the file, wrappers and all."""
        names, self.left_out = unwrapped(reader.tensors)
        super().__init__(reader, {name: name for name in names.values()} if as_stored else names)
