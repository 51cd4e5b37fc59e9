"""The parameters in a tree that holds more or wraps them: training states, flax's collections, nnx's variables.

Every tree format is opened through this, so that naming schemes see the parameters' own paths:

    params/...  params/params/...  state/params/...  target/...  model/... beside an optimizer
    variables/params/...  any/name/params/... where nothing but training states stands beside it
    model/...   beside a copy of it (`ema_model/...`, with the same names)
    .../value   where every leaf ends so, as in an `nnx.State`

What is beside the parameters (`opt_state`, `step`, `ema_params`, random number generators, other collections) is
left out, and reported; another of several trees is read by its path, `params_key`. flax's `batch_stats` belong to the
parameters: where they are, both collections keep their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from easytorch.bridge.core.reader import PartialReader, Reader
from easytorch.bridge.core.renamed_reader import RenamedReader
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.rules.table import RuleTable

_PARAMS, _BATCH_STATS = "params", "batch_stats"
_COLLECTIONS = {_PARAMS, _BATCH_STATS}
# Keys beside the model in training states; no model has such a name.
_TRAINING = frozenset(
    (
        *("opt_state", "optimizer", "optimizer_state", "opt", "tx", "rng", "rngs", "dropout_rng", "rng_key"),
        *("step", "global_step", "epoch", "ema", "ema_params", "ema_model", "train_iter", "dynamic_scale"),
    )
)
# Keys of an optimizer's state; a state that has one holds the model too.
_OPTIMIZER = frozenset(("opt_state", "optimizer", "optimizer_state", "opt"))
# Keys that always wrap the parameters, and keys that do so beside a training state or as its inner tree.
_WRAPPERS = (_PARAMS,)
_WRAPPERS_IN_TRAINING = ("model", "target", "state", "train_state", "graphstate", "optimizer", "opt")
# The key of the parameters in flax's optimizers before 0.6 and in T5X.
_TARGETS = (["target"], ["optimizer", "target"])
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
        if params_key is None:
            taken = _place(names)
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


def _place(names: _Named) -> list[str]:
    """The path of the tree that holds the parameters, among the collections `names`."""
    found = next(((path, name.split("/")) for path, name in names if path[0] == _PARAMS), None)
    return [] if found is None else found[1][: len(found[1]) - len(found[0]) + 1]


def _at(key: list[str], names: _Named) -> tuple[_Named, list[str]]:
    """The names under the path `key`, directly or within wrappers, with the batch statistics beside it."""
    taken: list[str] = []
    inner = names
    while True:
        chosen = [(path[len(key) :], name) for path, name in inner if path[: len(key)] == key and len(path) > len(key)]
        if chosen:
            break
        branches = {path[0] for path, _ in inner if len(path) > 1}
        known = (*_WRAPPERS_IN_TRAINING, *_WRAPPERS, *(branches if len(branches) == 1 else ()))
        wrapper = next((one for one in known if one in branches), None)
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
    """`names` with batch statistics at the root, and the parameters they belong to in `params`.

    They may stand in a tree of other collections (`model_state/batch_stats/...` of scenic, `flax_mutables` of T5X), and
    the parameters in a `target`.
    """
    branches = {path[0] for path, _ in names if len(path) > 1}
    if _BATCH_STATS not in branches:
        within = {path[0] for path, _ in names if len(path) > 2 and path[1] == _BATCH_STATS}
        # A tree with parameters of its own keeps its statistics.
        within -= {path[0] for path, _ in names if len(path) > 2 and path[1] == _PARAMS}
        if len(within) != 1 or not (_PARAMS in branches or _target(names)):
            return names
        names = [(path[1:] if path[0] in within and path[1] == _BATCH_STATS else path, name) for path, name in names]
    if _PARAMS not in branches and (target := _target(names)):
        depth = len(target)
        return [([_PARAMS, *path[depth:]] if path[:depth] == target else path, name) for path, name in names]
    return names


def _target(names: _Named) -> list[str]:
    """The keys of the tree that holds the parameters under another name than `params`; none where there is none.

    One that holds collections is no collection itself.
    """
    for target in _TARGETS:
        inner = {path[len(target)] for path, _ in names if path[: len(target)] == target and len(path) > len(target)}
        if inner:
            return [] if _BATCH_STATS in inner else [*target, _PARAMS] if _PARAMS in inner else target
    return []


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
    """The key at the root that wraps the parameters, or None where they are at the root."""
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
        if key not in branches:
            continue
        others = roots - {key} - (set() if key in _OPTIMIZER else _copies(key, paths))
        inner = {path[1] for path in paths if path[0] == key and len(path) > 1}
        # "model" alone is also what HF calls the base of a language model.
        beside = len(roots) > 1 and others <= _TRAINING | {"state"}
        if beside or inner & {_PARAMS, "target"} or (inner & _OPTIMIZER and key not in _OPTIMIZER):
            return key
    holders = branches - _TRAINING
    if len(holders) == 1 and roots - holders <= _TRAINING and any(_leads_to_params(path) for path in paths):
        return next(iter(holders))
    return None


def _copies(key: str, paths: list[list[str]]) -> set[str]:
    """The trees with exactly the names under `key`: averages of the model, and momenta."""
    trees: dict[str, set[tuple[str, ...]]] = {}
    for path in paths:
        trees.setdefault(path[0], set()).add(tuple(path[1:]))
    return {one for one, inner in trees.items() if inner == trees[key]} - {key}


def _leads_to_params(path: list[str]) -> bool:
    """Whether `params` stand on the way to a leaf, with no optimizer's state before them."""
    branches = path[1 : -2 if path[-1] in _VARIABLES else -1]
    return _PARAMS in branches and not _TRAINING.intersection(path[: path.index(_PARAMS)])


def in_collections(tree: RenamedReader, table: RuleTable) -> RenamedReader:
    """`tree` with its leaves in `params` and `batch_stats`, where `table` has them there and the tree has neither.

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
    """The reader that `in_collections` returns."""

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
