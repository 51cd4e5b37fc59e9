"""The plan of a conversion, from names and shapes alone: which tensors make which, and which are left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from easytorch.bridge.core.in_parts import InParts
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import FLOATING, numpy_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.rules.patterns import Bindings, Pattern
from easytorch.bridge.rules.table import TIED, TIED_ALWAYS, TIED_IN_TORCH, CompiledRule, RuleTable
from easytorch.bridge.rules.transforms import Shape, Transform, get_transform

# Whether two steps make bit-identical tensors.
Same = Callable[["Step", "Step"], bool]


@dataclass(frozen=True)
class Step:
    """Computes `targets` from `sources`. `reverse` applies the transform from its fused side to its parts."""

    sources: tuple[str, ...]
    targets: tuple[TensorInfo, ...]
    transform: Transform
    reverse: bool

    def run(self, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """The targets' data from the sources', in the targets' dtype; views unless the dtype changes."""
        return [made.whole() for made in self.run_in_parts([InParts.of(array) for array in arrays])]

    def run_in_parts(self, sources: Sequence[InParts]) -> Sequence[InParts]:
        """The same, with stacking and casting deferred until the elements are read."""
        return [
            made.cast(numpy_dtype(target.dtype)) for made, target in zip(self._made(sources), self.targets, strict=True)
        ]

    def _made(self, sources: Sequence[InParts]) -> Sequence[InParts]:
        with _of_tensor(self.sources[0]):
            return self._transformed(sources)

    def _transformed(self, sources: Sequence[InParts]) -> Sequence[InParts]:
        if self.transform is get_transform("identity"):
            return sources
        arrays = [source.whole() for source in sources]
        if self.transform.leaves > 1:
            change: Any = self.transform.to_torch if self.reverse else self.transform.to_flax
            return [InParts.of(array) for array in self._several(change(arrays))]
        if self.reverse:
            return [InParts.of(array) for array in self._several(self.transform.to_torch(arrays[0]))]
        if self.transform.to_flax_parts is not None:
            return [InParts.joined(self.transform.to_flax_parts(arrays), self.targets[0].shape)]
        return [InParts.of(one) for one in self._several((self.transform.to_flax(arrays),))]

    def _several(self, made: Any) -> Sequence[np.ndarray]:
        """The result of a layout, which may be a user's, checked: an array for each target."""
        names = ", ".join(target.name for target in self.targets)
        arrays: Sequence[np.ndarray] = _listed(made, len(self.targets), np.ndarray, self.transform, "array", names)
        return arrays


@dataclass
class Plan:
    """The steps of a conversion, in the target's order.

    `kept` are source tensors (torch) that the target (Flax) cannot hold, by their torch name. `tied` are torch names
    left out because they repeat the data at a Flax path. `notes` are for the user.
    """

    steps: list[Step] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def targets(self) -> dict[str, TensorInfo]:
        """Every target by name."""
        return {info.name: info for step in self.steps for info in step.targets}

    def keep(self, tensors: Iterable[TensorInfo]) -> None:
        """Adds `tensors` unchanged."""
        self.steps += [_as_it_is(info) for info in tensors]


def cast_plan(tensors: Mapping[str, TensorInfo], dtype: str) -> Plan:
    """Every tensor unchanged but floating point ones, cast to `dtype`; `CheckpointError` where that is impossible."""
    for name, info in tensors.items():
        if info.dtype in FLOATING and not np.can_cast(numpy_dtype(info.dtype), numpy_dtype(dtype), casting="unsafe"):
            raise CheckpointError(f"{info.dtype} cannot be cast to {dtype}; choose another dtype", tensor=name)
    cast = {name: replace(info, dtype=dtype) if info.dtype in FLOATING else info for name, info in tensors.items()}
    return Plan([Step((name,), (info,), get_transform("identity"), False) for name, info in cast.items()])


def plan_from_torch(
    tensors: Mapping[str, TensorInfo], table: RuleTable, *, tie: bool, same: Same, fill: Collection[str] = ()
) -> Plan:
    """torch -> a tree. `tie` is the config's `tie_word_embeddings`.

    `fill` are torch names that torch may leave out as repeats and the tree must have (`tied_in_torch`).
    """
    return _FromTorch(tensors, table, tie, same).plan(fill)


def plan_to_torch(
    tensors: Mapping[str, TensorInfo],
    table: RuleTable,
    *,
    tie: bool,
    same: Same,
    kept: Iterable[str] = (),
    tied: Iterable[str] = (),
) -> Plan:
    """A tree -> torch. `kept` and `tied` are torch names: tensors to be merged in, and repeats to be written again."""
    plan = Plan()
    kept = frozenset(kept)
    tied = frozenset(tied)
    leaves = _steps_to_torch(tensors, table)
    for path in [path for path in leaves if table.is_unread(path)]:
        _leave_out_unread(path, leaves, table, plan, same)
    for step in leaves.values():
        repeats = table.tie(step.targets[0].name)
        if repeats is not None and repeats[0].kind == TIED_IN_TORCH and tie and step.targets[0].name not in tied:
            original = leaves.get(repeats[1])
            if original is not None and same(step, original):
                plan.tied[step.targets[0].name] = repeats[1]
                continue
        if not any(target.name in kept for target in step.targets):
            plan.steps.append(step)
    made = plan.targets
    for path, step in leaves.items():
        # What the leaf holds is the repeat's where the original of torch, which it does not compute with, is kept.
        displaced = any(target.name in kept for target in step.targets)
        for rule, name in table.tied_to(path):
            alone = rule.kind == TIED_ALWAYS or (rule.kind == TIED and table.torch_rule(name) is None)
            if name not in made and name not in plan.tied and (name in tied or displaced or (alone and not tie)):
                plan.steps.append(_with_target(step, name))
    return plan


def _leave_out_unread(path: str, leaves: dict[str, Step], table: RuleTable, plan: Plan, same: Same) -> None:
    """Removes leaf `path` from `leaves` where it repeats the one that its program uses instead."""
    name = leaves[path].targets[0].name
    tie = table.tie(name)
    original = None if tie is None else leaves.get(tie[1])
    if tie is None or original is None:
        return
    if not same(leaves[path], original):
        raise CheckpointError(
            f"differs from {tie[1]}, to which the config ties it, so that its program computes with that one; set "
            "`tie_word_embeddings` to false in config.json where this is the model's, or drop it (`--drop`)",
            tensor=path,
        )
    del leaves[path]
    plan.tied[name] = tie[1]


class _FromTorch:
    def __init__(self, tensors: Mapping[str, TensorInfo], table: RuleTable, tie: bool, same: Same) -> None:
        self._tensors = tensors
        self._table = table
        self._tie = tie
        self._same = same
        # Name in the rules -> name in the source.
        self._given = table.torch_names(tensors)
        self._plan = Plan()
        self._parts: dict[tuple[int, str], tuple[CompiledRule, Bindings, dict[int, str]]] = {}

    def plan(self, fill: Collection[str]) -> Plan:
        names = dict.fromkeys(self._given)
        for name in list(names):
            if self._table.is_buffer(name):
                self._plan.kept[name] = self._given[name]
                del names[name]
        for name in list(names):
            if name in names and (tie := self._table.tie(name)) is not None:
                self._resolve(name, tie[0], tie[1], names)
        for name in names:
            self._move(name, self._given[name])
        self._fill(names, fill)
        ordered = sorted(self._parts.values(), key=lambda entry: entry[0].order(entry[1]))
        self._plan.steps = [self._step(*entry) for entry in ordered]
        return self._plan

    def _resolve(self, name: str, rule: CompiledRule, path: str, names: dict[str, None]) -> None:
        """A torch tensor that may repeat the one at `path`: left out where Flax has it once."""
        source = self._source(name, path)
        alone = self._table.torch_rule(name) is None
        if source not in names:
            if self._tie or alone or rule.kind == TIED_ALWAYS:
                # It replaces the original from here on: other repeats are compared with it.
                del names[name]
                names[source] = None
                self._given[source] = self._given[name]
            return
        if self._identical(name, source):
            self._plan.tied[name] = path
            if rule.kind != TIED_IN_TORCH:
                del names[name]
            return
        if alone and not name.endswith(".bias"):
            raise CheckpointError(
                f"differs from {self._given[source]!r}, to which it is tied, and there is one leaf for both, {path!r}; "
                "convert to a format with a place for each (flax, orbax), or make them equal",
                file=self._tensors[self._given[name]].file or None,
                tensor=self._given[name],
            )
        if alone:
            # torch adds this one, the layer's bias; `source`, the head's own name for it, is read by nothing.
            del names[name]
            self._plan.kept[source] = self._given[source]
            self._given[source] = self._given[name]
        elif self._tie:
            self._plan.notes.append(
                f"{name} differs from {source}, to which the class ties it where they agree; both are kept"
            )

    def _fill(self, names: Mapping[str, None], fill: Collection[str]) -> None:
        for name in fill:
            tie = self._table.tie(name)
            if name in names or tie is None or tie[0].kind != TIED_IN_TORCH:
                continue
            source = self._source(name, tie[1])
            if source in names:
                self._move(name, self._given[source])

    def _source(self, name: str, path: str) -> str:
        """The torch tensor that makes leaf `path`, which `name` is tied to."""
        found = self._table.flax_rule(path)
        if found is None:
            raise CheckpointError(
                f"is tied to {path!r}, which no row of the table makes; add a row for that leaf, or change the tie",
                tensor=name,
            )
        rule, bindings = found
        return rule.torch[0].fill(bindings)

    def _identical(self, name: str, other: str) -> bool:
        return self._same(*(_as_it_is(self._tensors[self._given[one]]) for one in (name, other)))

    def _move(self, name: str, source: str) -> None:
        found = self._table.torch_rule(name)
        info = self._tensors[source]
        if found is None:
            raise CheckpointError(self._table.unknown_torch(name), file=info.file or None, tensor=source)
        rule, part, bindings = found
        entry = self._parts.setdefault((rule.number, rule.flax.fill(bindings)), (rule, bindings, {}))
        entry[2][part] = source

    def _step(self, rule: CompiledRule, bindings: Bindings, parts: Mapping[int, str]) -> Step:
        infos = {number: self._tensors[name] for number, name in parts.items()}
        if rule.exchanged:
            return _exchange(infos, rule, bindings, reverse=False)
        return _cut(infos[0], rule, rule.leaves, bindings) if rule.cut else _fused(infos, rule, bindings)


def _steps_to_torch(tensors: Mapping[str, TensorInfo], table: RuleTable) -> dict[str, Step]:
    """Leaf -> its step; the step of a torch tensor that is made of several leaves is at the last of them."""
    steps: dict[str, Step] = {}
    pending: dict[tuple[int, Bindings], tuple[CompiledRule, Bindings, dict[int, TensorInfo]]] = {}
    for path, info in tensors.items():
        found = table.leaf_rule(path)
        if found is None:
            raise CheckpointError(table.unknown_flax(path, tensors), file=info.file or None, tensor=path)
        rule, part, bindings = found
        if not rule.cut and not rule.exchanged:
            steps[path] = _cut(info, rule, rule.torch, bindings)
            continue
        infos = pending.setdefault((rule.number, bindings), (rule, bindings, {}))[2]
        infos[part] = info
        if len(infos) == len(rule.leaves):
            del pending[rule.number, bindings]
            steps[path] = _of_several(infos, rule, bindings)
    for rule, bindings, infos in pending.values():
        _of_several(infos, rule, bindings)  # its error: a leaf is missing
    return steps


def _of_several(leaves: Mapping[int, TensorInfo], rule: CompiledRule, bindings: Bindings) -> Step:
    """The step of leaves that are converted together."""
    return _exchange(leaves, rule, bindings, reverse=True) if rule.exchanged else _fused(leaves, rule, bindings)


def _exchange(infos: Mapping[int, TensorInfo], rule: CompiledRule, bindings: Bindings, *, reverse: bool) -> Step:
    """The step that makes several tensors of `infos` (by place in the rule) together; reverse: torch's tensors."""
    given, made = (rule.leaves, rule.torch) if reverse else (rule.torch, rule.leaves)
    listed = _all_of(infos, given, made[0], bindings)
    shapes: Any = rule.transform.torch_shapes if reverse else rule.transform.flax_shape
    made_shapes = _shapes(shapes, [info.shape for info in listed], len(made), rule.transform, listed[0])
    targets = tuple(
        TensorInfo(pattern.fill(bindings), shape, listed[0].dtype)
        for pattern, shape in zip(made, made_shapes, strict=True)
    )
    return Step(tuple(info.name for info in listed), targets, rule.transform, reverse)


def _fused(infos: Mapping[int, TensorInfo], rule: CompiledRule, bindings: Bindings) -> Step:
    """The step that joins `infos` (by place in the rule) into one tensor."""
    parts, whole = (rule.leaves, rule.torch[0]) if rule.cut else (rule.torch, rule.flax)
    listed = _all_of(infos, parts, whole, bindings)
    for info in listed:
        _check_rank(info, rule.transform.torch_rank)
    dtype = listed[0].dtype if rule.cut else rule.transform.flax_dtype or listed[0].dtype
    shapes = [info.shape for info in listed]
    (shape,) = _shapes(lambda given: (rule.transform.flax_shape(given),), shapes, 1, rule.transform, listed[0])
    target = TensorInfo(whole.fill(bindings), shape, dtype)
    return Step(tuple(info.name for info in listed), (target,), rule.transform, False)


def _all_of(
    infos: Mapping[int, TensorInfo], parts: Sequence[Pattern], whole: Pattern, bindings: Bindings
) -> list[TensorInfo]:
    """`infos` in their order; `CheckpointError` where one of `parts` is missing or of another element type."""
    for number, pattern in enumerate(parts):
        if number not in infos:
            message = f"is missing, and {whole.fill(bindings)!r} is made of it and others"
            raise CheckpointError(message, tensor=pattern.fill(bindings))
    listed = [infos[number] for number in range(len(parts))]
    for info in listed:
        if info.dtype != listed[0].dtype:
            message = (
                f"is {info.dtype}, {listed[0].name!r} is {listed[0].dtype}, and they make one tensor; give a dtype"
            )
            raise CheckpointError(message, file=info.file or None, tensor=info.name)
    return listed


def _cut(info: TensorInfo, rule: CompiledRule, patterns: Sequence[Pattern], bindings: Bindings) -> Step:
    """The step that splits `info` into tensors named by `patterns`."""
    _check_rank(info, rule.transform.rank)
    shapes = _shapes(rule.transform.torch_shapes, info.shape, len(patterns), rule.transform, info)
    dtype = info.dtype if rule.cut else rule.transform.torch_dtype or info.dtype
    targets = tuple(
        TensorInfo(pattern.fill(bindings), shape, dtype, info.file)
        for pattern, shape in zip(patterns, shapes, strict=True)
    )
    return Step((info.name,), targets, rule.transform, True)


def _check_rank(info: TensorInfo, rank: int | None) -> None:
    if rank is not None and len(info.shape) != rank:
        message = f"has shape {info.shape}, and its rule needs {rank} dimensions; the checkpoint is not of this family"
        raise CheckpointError(message, file=info.file or None, tensor=info.name)


def _shapes(
    function: Callable[[Any], Any], given: Any, count: int, transform: Transform, info: TensorInfo
) -> list[Shape]:
    """The `count` shapes that `function`, a layout's, makes of those `given`, checked. info: of the first tensor."""
    with _of_tensor(info.name, info.file or None):
        made = function(given)
    return [tuple(shape) for shape in _listed(made, count, tuple | list, transform, "shape", info.name)]


@contextmanager
def _of_tensor(name: str, file: str | None = None) -> Iterator[None]:
    """Says which tensor a layout, which knows only shapes and arrays, refused."""
    try:
        yield
    except CheckpointError as error:
        if error.tensor is not None:
            raise
        raise CheckpointError(str(error), file=file, tensor=name) from error


def _listed(made: Any, count: int, kind: Any, transform: Transform, what: str, names: str) -> Any:
    """`made`, returned by a layout that may be a user's; `CheckpointError` unless it is a list of `count` of `kind`."""
    if not isinstance(made, tuple | list) or len(made) != count or not all(isinstance(one, kind) for one in made):
        given = f"{len(made)} of them" if isinstance(made, tuple | list) else f"a {type(made).__name__}"
        raise CheckpointError(
            f"the layout {transform.name!r} gives {given} where a tuple of {count} {what}{'s'[: count - 1]} is wanted; "
            "correct it",
            tensor=names,
        )
    return made


def _as_it_is(info: TensorInfo) -> Step:
    return Step((info.name,), (info,), get_transform("identity"), False)


def _with_target(step: Step, name: str) -> Step:
    (target,) = step.targets
    return Step(step.sources, (TensorInfo(name, target.shape, target.dtype),), step.transform, step.reverse)
