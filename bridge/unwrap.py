"""The parameters in a tree that holds more or wraps them: training states, flax's collections, nnx's variables.

Every tree format is opened through this, so that naming schemes see the parameters' own paths:

    params/...  params/params/...  state/params/...  target/...  model/... beside an optimizer
    .../value   where every leaf ends so, as in an `nnx.State`

What stands beside the parameters (`opt_state`, `step`, `ema_params`, random number generators, other collections) is
left out, and reported; another of several trees is read by its path, `params_key`. flax's `batch_stats` belong to the
parameters: where they are, both collections keep their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import PartialReader, Reader
from easytorch.bridge.formats.renamed import RenamedReader
from easytorch.bridge.rules import RuleTable

_PARAMS, _BATCH_STATS = "params", "batch_stats"
_COLLECTIONS = {_PARAMS, _BATCH_STATS}
# What training states keep beside the model; a model of its own is never called so.
_TRAINING = frozenset(
    ("opt_state", "optimizer", "optimizer_state", "opt", "step", "tx", "rng", "rngs", "ema", "ema_params", "train_iter")
)
# Names that wrap the parameters wherever they stand, and names that do beside a training state or as its inner tree.
_WRAPPERS = (_PARAMS,)
_WRAPPERS_IN_TRAINING = ("model", "target", "state", "train_state", "graphstate", "optimizer", "opt")
# What training states call the collections that are no parameters (scenic, flax's examples before 0.5, T5X).
_MUTABLE = ("model_state", "extra_variables", "mutable_variables", "flax_mutables")
_VARIABLES = ("value", ".value", "raw_value")
_GENERATOR = ("count", "key")

# The keys that lead to a tensor, from where the parameters begin, and its name.
_Named = list[tuple[list[str], str]]


@dataclass(frozen=True)
class Unwrapped:
    """Parameter path -> its name in the tree, in order; the names left out; the path of what was read, "" for all."""

    names: dict[str, str]
    left_out: tuple[str, ...]
    read: str


def unwrapped(tensors: Iterable[str], params_key: str | None = None) -> Unwrapped:
    """The parameters among the names `tensors`. params_key: the path of the tree to read, where there are several."""
    given = list(tensors)
    names: _Named = [(name.split("/"), name) for name in given]
    taken: list[str] = []
    names = _beside_parameters(names)
    if params_key is not None:
        names, taken = _at(params_key.strip("/").split("/"), names)
    while (key := _wrapper([path for path, _ in names])) is not None:
        names = _beside_parameters([(path[1:], name) for path, name in names if path[0] == key and len(path) > 1])
        taken.append(key)
    if any(path[0] == _BATCH_STATS for path, _ in names):
        names = _collections(names)
        taken += [] if params_key is not None or len(names) == len(given) else [_PARAMS]
    if all(path[-1] in _VARIABLES and len(path) > 1 for path, _ in names):
        names = [(path[:-1], name) for path, name in names]
    # An nnx module's generators: `drop/rngs/count` and `key`, or those of each stream, `drop/rngs/default/key`.
    names = [(path, name) for path, name in names if not ("rngs" in path[-3:-1] and path[-1] in _GENERATOR)]
    found: dict[str, str] = {}
    for path, name in names:
        if found.setdefault("/".join(path), name) != name:
            raise CheckpointError(f"and {found['/'.join(path)]!r} are one parameter; remove one", tensor=name)
    left = set(given).difference(found.values())
    return Unwrapped(found, tuple(name for name in given if name in left), "/".join(taken))


def _at(key: list[str], names: _Named) -> tuple[_Named, list[str]]:
    """The names under the path `key`, as it stands or within wrappers, with the statistics of batches beside it."""
    taken: list[str] = []
    inner = names
    while True:
        chosen = [(path[len(key) :], name) for path, name in inner if path[: len(key)] == key and len(path) > len(key)]
        if chosen:
            break
        wrapper = next((one for one in _WRAPPERS_IN_TRAINING if any(path[0] == one for path, _ in inner)), None)
        if wrapper is None:
            trees = ", ".join(sorted({path[0] for path, _ in names if len(path) > 1})) or "none"
            raise CheckpointError(f"there is no tree called {'/'.join(key)!r} in the checkpoint; its trees are {trees}")
        inner = _beside_parameters([(path[1:], name) for path, name in inner if path[0] == wrapper and len(path) > 1])
        taken.append(wrapper)
    statistics = [(path, name) for path, name in inner if path[0] == _BATCH_STATS and len(path) > 1]
    inside = {path[0] for path, _ in chosen}
    if statistics and _BATCH_STATS not in inside and key != [_BATCH_STATS]:
        parameters = [(path if inside == {_PARAMS} else [_PARAMS, *path], name) for path, name in chosen]
        chosen = parameters + statistics
    return chosen, [*taken, *key]


def _beside_parameters(names: _Named) -> _Named:
    """`names` with the statistics of batches that stand in a tree of other collections, `model_state/batch_stats/...`,
    beside the parameters."""
    if not any(path[0] == _PARAMS for path, _ in names):
        return names
    return [
        (path[1:] if path[0] in _MUTABLE and len(path) > 2 and path[1] == _BATCH_STATS else path, name)
        for path, name in names
    ]


def _collections(names: _Named) -> _Named:
    """`params` and `batch_stats` alone, without a second collection's name inside them (`variables["batch_stats"]`)."""
    found: _Named = []
    for collection in (_PARAMS, _BATCH_STATS):
        members = [(path, name) for path, name in names if path[0] == collection and len(path) > 1]
        while members and all(len(path) > 2 and path[1] == collection for path, _ in members):
            members = [(path[1:], name) for path, name in members]
        found += members
    order = {name: number for number, (_, name) in enumerate(names)}
    return sorted(found, key=lambda entry: order[entry[1]])


def _wrapper(paths: list[list[str]]) -> str | None:
    """The key at the root that the parameters stand under, or None where they stand at the root."""
    branches = {path[0] for path in paths if len(path) > 1}
    roots = {path[0] for path in paths}
    if branches >= _COLLECTIONS:
        # Statistics may stand among the parameters instead: a state whose `params` are all variables.
        inner = {path[1] for path in paths if path[0] == _PARAMS and len(path) > 2}
        return _PARAMS if inner >= _COLLECTIONS else None
    if _BATCH_STATS in branches:
        return None
    for key in _WRAPPERS:
        if key in branches:
            return key
    for key in _WRAPPERS_IN_TRAINING:
        others = roots - {key}
        inner = {path[1] for path in paths if path[0] == key and len(path) > 1}
        # "model" alone is also what HF calls the base of a language model.
        if key in branches and ((others and others <= _TRAINING | {"state"}) or inner & {_PARAMS, "target"}):
            return key
    return None


def in_collections(tree: RenamedReader, table: RuleTable) -> RenamedReader:
    """`tree` with its leaves in `params` and `batch_stats`, where `table` knows them there and they stand in neither.

    A file does not say which leaves of an nnx tree are statistics, as the module itself does: the table does.
    """
    if all(table.leaf_rule(path) is not None for path in tree.tensors):
        return tree
    names = {}
    for path in tree.tensors:
        placed = [name for one in (_PARAMS, _BATCH_STATS) if table.leaf_rule(name := f"{one}/{path}") is not None]
        if len(placed) != 1:
            return tree
        names[placed[0]] = path
    return _Collected(tree, names)


class _Collected(RenamedReader):
    """What `in_collections` gives."""

    def __init__(self, tree: RenamedReader, names: dict[str, str]) -> None:
        super().__init__(tree, names)
        self.left_out = tree.left_out if isinstance(tree, PartialReader) else ()
        self.tree = tree.tree if isinstance(tree, UnwrappedReader) else ""


class UnwrappedReader(RenamedReader):
    """The parameters of an open tree, which is read at `tree`, by their own paths; `left_out` are all other names."""

    def __init__(self, reader: Reader, *, params_key: str | None = None) -> None:
        self._found = unwrapped(reader.tensors, params_key)
        self.left_out, self.tree = self._found.left_out, self._found.read
        super().__init__(reader, self._found.names)

    def as_stored(self) -> RenamedReader:
        """The same tensors under the names they have in the file, wrappers and all."""
        return RenamedReader(self._reader, {name: name for name in self._found.names.values()})
