"""An open checkpoint with its scheme and config, and its weights under other names: source -> torch -> target."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from easytorch.bridge.core.config import Config, find_config, given_config
from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.reader import DescribedReader, PartialReader, Reader
from easytorch.bridge.core.renamed_reader import RenamedReader, matching, without
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.core.unsupported import note_on_narrow, refuse_quantized
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.base import Format, OwnNames
from easytorch.bridge.formats.steps import chosen, step_folder, step_read, steps_in
from easytorch.bridge.formats.torch_buffers import TorchBuffers
from easytorch.bridge.names.architecture import Architecture, architecture_of, check, without_layers
from easytorch.bridge.names.flax_convention import flax_rules, outlined_rules
from easytorch.bridge.names.fused_reader import by_hub_names
from easytorch.bridge.names.native_rules import native_rules
from easytorch.bridge.names.outline import outline_of
from easytorch.bridge.names.tied_weights import held_apart, untied
from easytorch.bridge.names.unwrap import UnwrappedReader, in_collections
from easytorch.bridge.rules.completeness import refuse_missing
from easytorch.bridge.rules.plan import Plan, plan_from_torch, plan_to_torch
from easytorch.bridge.rules.planned_reader import PlannedReader, same_data
from easytorch.bridge.rules.table import BUFFER, Rules, RuleTable, compile_rules
from easytorch.bridge.schemes.registry import TORCH, get_scheme, recognise
from easytorch.bridge.storage.temp_arrays import TempArrays


@dataclass
class NamedWeights:
    """Weights under a scheme's names. `kept`: torch tensors that the scheme cannot hold; `tied`: repeats left out.

    `config` is the new content of config.json where the source's declares ties that the weights do not have.
    """

    reader: Reader
    kept: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None


class Checkpoint(ContextManager):
    """An open checkpoint. `scheme` is the name of its tensors' scheme; `config` is None where there is none.

    `reader` has everything in the files, including what is not a weight of the model. `temp_arrays` buffers parts of
    stacked leaves.
    """

    def __init__(
        self,
        format_: Format,
        reader: Reader,
        scheme: str,
        config: Config | None,
        *,
        weights: Reader | None = None,
        step: str | None = None,
        dropped: Collection[str] = (),
    ) -> None:
        """weights: the tensors of `reader` that belong to the model. step: a note on which step of a run is read.

        dropped: the names that the user left out of `weights`.
        """
        self.format = format_
        self.reader = reader
        self.scheme = scheme
        self.temp_arrays = TempArrays()
        self._weights = reader if weights is None else weights
        self._step = step
        self._dropped = tuple(dropped)
        self._config = config
        self._torch_buffers: TorchBuffers | None = None
        self._torch = reader
        self._outlined: Architecture | None = None

    @property
    def weights(self) -> Reader:
        """The tensors of `reader` that belong to the model."""
        return self._weights

    @property
    def dropped(self) -> tuple[str, ...]:
        """The names that the user left out of the weights."""
        return self._dropped

    @property
    def config(self) -> Config | None:
        """Its config.json: given, found beside it or inferred from names and shapes; None if that is not possible."""
        return self._config

    @property
    def needed_config(self) -> Config:
        """The config; `CheckpointError` where there is none."""
        if self._config is None:
            raise CheckpointError(
                "there is no config.json beside the weights; copy the model's there, or give it by `config`",
                file=_folder(self.reader.files[0]),
            )
        return self._config

    @cached_property
    def architecture(self) -> Architecture:
        """The parameters the config describes."""
        return architecture_of(self.needed_config, *self._given)

    @property
    def _given(self) -> tuple[int, Collection[str]]:
        """The most layers there may be, and the names that a table must know: torch's and Flax's."""
        tensors = self._weights.tensors
        if self.scheme in (TORCH, "flax"):
            return len(tensors), tensors
        # Schemes that stack layers have fewer leaves than layers.
        return len(tensors) + max((min(info.shape) for info in tensors.values() if len(info.shape) > 1), default=0), ()

    @property
    def _known(self) -> Architecture:
        """`architecture`, or the same from an outline where one has described the weights."""
        return self._outlined or self.architecture

    def _by_outline(self, scheme: str) -> Architecture | None:
        """The architecture from its family's outline, where the weights are exactly those it lists."""
        schemes = {scheme, self.scheme}
        if self.scheme == "easydel" or not all(get_scheme(one).by_outline for one in schemes - {TORCH}):
            return None
        tensors, given = self._given
        found = outline_of(self.needed_config, tensors, given)
        native = native_rules(self.needed_config.model_type) is not None
        if found is None or (native and schemes == {TORCH, "flax"}):
            return found
        return found if outlined_rules(found.names, given) is not None else None

    def _apart(self, torch: Reader) -> Architecture:
        """The architecture, with the tied weights that `torch` stores separately."""
        apart = held_apart(torch.tensors, self._known, same_data(torch))
        # Whether config.json then says tie_word_embeddings depends on transformers' config class.
        return replace(self.architecture if apart else self._known, apart=apart)

    def in_scheme(self, scheme: str, *, strict: bool = True) -> NamedWeights:
        """The weights under the names of `scheme`.

        strict: where names change, the weights are held against the architecture, and a tied repeat is left out only
        if its bits are those it repeats. Loading into memory passes False: it checks names itself and keeps repeats.
        """
        if not self._weights.tensors:
            raise CheckpointError("holds no tensors", file=self.reader.files[0])
        if scheme == self.scheme:
            stored = self.format.scheme is None and scheme != "flax"
            weights = (
                self._weights.as_stored() if stored and isinstance(self._weights, UnwrappedReader) else self._weights
            )
            if scheme == TORCH:
                return NamedWeights(weights, notes=self._left_out())
            # From one container to another, tensors without a name in the scheme stay in the file beside.
            buffers, kept, tied = self._open_torch_buffers()
            self._torch = self._torch if buffers is None else buffers
            return NamedWeights(weights, {name: name for name in kept}, dict.fromkeys(tied, ""), self._left_out())
        refuse_quantized(self.needed_config.content, self.needed_config.file)
        self._outlined = self._by_outline(scheme) if strict else None
        if self.scheme == TORCH:
            weights = by_hub_names(self._weights, self._known.names)
            notes = [*self._left_out(), *note_on_narrow(weights.tensors, self._known.names.floating)]
            return self._from_torch(NamedWeights(weights, notes=notes), scheme, checked=not strict)
        torch = self._to_torch(strict)
        if scheme != TORCH:
            return self._from_torch(torch, scheme, checked=True)
        if strict:
            torch.config = self._untied(self._apart(torch.reader), torch.notes, scheme)
        return torch

    def _untied(self, architecture: Architecture, notes: list[str], scheme: str) -> dict[str, Any] | None:
        """config.json's content where it must declare tied weights separate, and a note on that."""
        content = untied(self.needed_config.content, architecture, scheme)
        if content is not None:
            names = ", ".join(sorted(architecture.apart))
            notes.append(f"config.json says `tie_word_embeddings: false` now, as {names} is a weight of its own")
        return content

    def by_rules(self, rules: Rules, scheme: str) -> NamedWeights:
        """The weights of a user's own model, by the user's table, which must name every one of them.

        scheme: torch's, or any other for the names of the table's leaves. The table's rows say which weights are tied.
        """
        table = compile_rules(rules)
        if self.scheme != TORCH and isinstance(self._weights, RenamedReader):
            self._weights = in_collections(self._weights, table)
        tensors = self._weights.tensors
        if not tensors:
            raise CheckpointError("holds no tensors", file=self.reader.files[0])
        if (scheme == TORCH) == (self.scheme == TORCH):
            raise CheckpointError(
                "rules say how torch's names and a tree's are exchanged, and here both sides have "
                f"{'torch' if scheme == TORCH else 'a tree'}'s",
                file=self.reader.files[0],
            )
        same = same_data(self._weights)
        buffers = None
        if scheme == TORCH:
            buffers, kept, tied = self._open_torch_buffers()
            plan = plan_to_torch(tensors, table, tie=True, same=same, kept=kept, tied=tied)
            plan.keep(kept.values())
        else:
            plan = plan_from_torch(tensors, table, tie=True, same=same)
        refuse_missing(plan, table, self._dropped_names())
        plan.notes += self._left_out()
        self._torch = self._weights
        return _named_weights(PlannedReader(self._weights, plan, buffers, self.temp_arrays), plan)

    def _open_torch_buffers(self) -> tuple[TorchBuffers | None, Mapping[str, TensorInfo], list[str]]:
        """The file of torch tensors beside a tree, which stays open; those tensors, and the repeats that torch had."""
        if self._torch_buffers is None:
            self._torch_buffers = TorchBuffers.beside(self.reader.files[0])
        buffers = self._torch_buffers
        return (None, {}, []) if buffers is None else (buffers, buffers.tensors, buffers.tied)

    def _dropped_names(self) -> set[str]:
        """The names that the tensors left out by the user would have among the weights."""
        dropped = matching(self.reader, self._dropped)
        if self.scheme == TORCH or not isinstance(self._weights, RenamedReader):
            return dropped
        names = set()
        for before, after in {_around(path, stored) for path, stored in self._weights.names.items()}:
            inside = [name for name in dropped if name.startswith(before) and name.endswith(after)]
            names |= {name[len(before) : len(name) - len(after)] for name in inside}
        return names

    def _left_out(self) -> list[str]:
        """Notes: which step of a run and which tree of a training state are read, and what is left out."""
        notes = [] if self._step is None else [self._step]
        notes += [f"dropped: {', '.join(self._dropped)}"] if self._dropped else []
        if not isinstance(self._weights, PartialReader) or not self._weights.left_out:
            return notes
        names, tree = self._weights.left_out, self.tree
        wrapper = tree.rpartition("/")[0]
        kinds = ", ".join(sorted({name.removeprefix(f"{wrapper}/").split("/")[0] for name in names}))
        read = f"`{tree}` is read{self._own_step(wrapper)}; " if tree else ""
        return [*notes, f"{read}{len(names)} arrays beside the parameters are left out ({kinds})"]

    @property
    def tree(self) -> str:
        """The path of the tree that is read, where the checkpoint holds more than parameters."""
        return getattr(self._weights, "tree", "")

    def _own_step(self, wrapper: str) -> str:
        """The step count stored in a training state."""
        name = f"{wrapper}/step" if wrapper else "step"
        info = self.reader.tensors.get(name)
        return f", of step {self.reader.read(name).item()}" if info is not None and info.shape == () else ""

    def _to_torch(self, strict: bool) -> NamedWeights:
        rules = get_scheme(self.scheme).rules(self.needed_config, self._known, self._weights.tensors)
        buffers, kept, tied = self._open_torch_buffers()
        table = compile_rules(rules)
        if beside := tuple((name, None, BUFFER) for name in kept if not table.knows(name)):
            table = compile_rules((*rules, *beside))
        if isinstance(self._weights, RenamedReader):
            self._weights = in_collections(self._weights, table)
        same = same_data(self._weights)
        plan = plan_to_torch(self._weights.tensors, table, tie=self._known.tie, same=same, kept=kept, tied=tied)
        plan.keep(kept.values())
        if strict:
            self._check(plan.targets, table)
        _refuse_unused(plan, self._weights.tensors, table, kept)
        plan.notes += [*_cut_off(plan, self._weights.tensors), *self._left_out()]
        self._torch = PlannedReader(self._weights, plan, buffers, self.temp_arrays)
        return _named_weights(self._torch, plan)

    def _from_torch(self, torch: NamedWeights, scheme: str, *, checked: bool) -> NamedWeights:
        reader = torch.reader
        same = same_data(reader)
        architecture = self._apart(reader)
        rules = get_scheme(scheme).rules(self.needed_config, architecture, None)
        table = compile_rules((*rules, *self._buffers(reader, compile_rules(rules))))
        fill: Collection[str] = architecture.shapes if architecture.tie else ()
        plan = plan_from_torch(reader.tensors, table, tie=architecture.tie, same=same, fill=fill)
        if not checked:
            self._check(
                {name: reader.tensors[given] for name, given in table.torch_names(reader.tensors).items()}, table
            )
        plan.notes[:0] = torch.notes
        made = _named_weights(PlannedReader(reader, plan, temp_arrays=self.temp_arrays), plan)
        made.config = self._untied(architecture, made.notes, scheme)
        return made

    def _buffers(self, torch: Reader, table: RuleTable) -> Rules:
        """Rows for tensors that `table` does not know and that are not weights: buffers, leftovers of old versions."""
        unknown = [name for name in table.torch_names(torch.tensors) if not table.knows(name)]
        if not unknown:
            return ()
        usual = compile_rules(flax_rules(self.needed_config, replace(self.architecture, given=unknown)))
        return tuple((name, None, BUFFER) for name in unknown if usual.is_buffer(name))

    @property
    def torch_reader(self) -> Reader:
        """The weights by torch's names, available after `in_scheme`."""
        return by_hub_names(self._weights, self._known.names) if self.scheme == TORCH else self._torch

    def read_torch(self, name: str) -> np.ndarray:
        """The data of a torch tensor that `NamedWeights.kept` names."""
        return self._torch.read(name)

    def _check(self, tensors: Mapping[str, TensorInfo], table: RuleTable) -> None:
        weights = {name: info for name, info in tensors.items() if not table.is_buffer(name)}
        check(weights, self._known, table, without_layers(self.needed_config.content))

    def close(self) -> None:
        self.reader.close()
        if self._torch_buffers is not None:
            self._torch_buffers.close()


def open_checkpoint(
    path: Path,
    *,
    prefer: registry.Kind | None = None,
    found: registry.Found | None = None,
    scheme: str | None = None,
    config: str | PathLike[str] | Config | None = None,
    writable: bool = False,
    step: int | None = None,
    params_key: str | None = None,
    drop: Collection[str] = (),
) -> Checkpoint:
    """The checkpoint at `path`, a folder or a weight file.

    step: which of a run's, the last one without. params_key: which tree of a training state (`bridge.names.unwrap`).
    scheme: whose names it carries, where they do not say it themselves. config: a config.json, the folder of one, or
    what it would hold, for a checkpoint that has none. `prefer`, `found`, `writable`: as in `formats.registry`. drop:
    names of tensors that are not read, `*` in them standing for anything.
    """
    steps = steps_in(path)
    place, found = (path, found) if found else chosen(path, step, steps)
    format_, file = registry.find(place, prefer=prefer, found=found)
    if isinstance(config, Config):
        known: Config | None = config
    elif config is not None:
        known = given_config(Path(config))
    else:
        known = find_config(path)
        if known is None and (folder := step_folder(path, file, steps)) is not None:
            known = find_config(folder)
    reader = format_.open(file, writable=writable)
    try:
        kept = without(reader, drop) if drop else reader
        if known is None and isinstance(reader, DescribedReader) and (stated := reader.config()) is not None:
            known = Config(_folder(path) / "config.json", stated)
        said = step_read(path, file, steps)
        if format_.scheme is not None:
            if params_key is not None:
                raise CheckpointError(f"is {format_.name}, and `params_key` is for trees of arrays", file=file)
            own = _given(scheme, format_, file)
            return Checkpoint(format_, reader, own, known, weights=kept, step=said, dropped=drop)
        unwrapped = UnwrappedReader(kept, params_key=params_key)
        weights = unwrapped.tensors
        usual = format_.usual_scheme if isinstance(format_, OwnNames) else None
        names = recognise(weights, known, usual) if scheme is None else get_scheme(scheme)
        if known is None and (content := names.infer_config(weights)) is not None:
            known = Config(_folder(path) / "config.json", content)
        return Checkpoint(format_, reader, names.name, known, weights=unwrapped, step=said, dropped=drop)
    except BaseException:
        reader.close()
        raise


def _given(scheme: str | None, format_: Format, file: Path) -> str:
    assert format_.scheme is not None
    if scheme not in (None, format_.scheme):
        raise CheckpointError(f"is {format_.name}, whose names are {format_.scheme!r} and not {scheme!r}", file=file)
    return format_.scheme


def _cut_off(plan: Plan, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Notes on the leaves of which only a part is used, as of a padded vocabulary."""
    notes = []
    for step in plan.steps:
        given = sum(math.prod(tensors[name].shape) for name in step.sources if name in tensors)
        made = sum(math.prod(info.shape) for info in step.targets)
        if given > made:
            first = step.targets[0]
            notes.append(
                f"{given - made} of {given} elements of {step.sources[0]} are left out: with this config "
                f"{first.name} is {first.shape}"
            )
    return notes


def _refuse_unused(plan: Plan, tensors: Mapping[str, TensorInfo], table: RuleTable, kept: Collection[str]) -> None:
    """Refuses to lose a leaf: each must become a torch tensor, repeat one, or be kept in the file beside."""
    used = {name for step in plan.steps for name in step.sources}
    for path in tensors:
        found = table.leaf_rule(path)
        made = () if found is None else [pattern.fill(found[2]) for pattern in found[0].torch]
        if path not in used and not any(name in plan.tied or name in kept for name in made):
            raise CheckpointError("would be lost: no torch tensor is made of it", tensor=path)


def _around(path: str, stored: str) -> tuple[str, str]:
    """The prefix and suffix that the stored name adds to a leaf's path."""
    # An nnx module's leaf may be named with a collection that the file does not name.
    path = path if path in stored else path.partition("/")[2]
    before, _, after = stored.rpartition(path)
    return before, after


def _named_weights(reader: Reader, plan: Plan) -> NamedWeights:
    return NamedWeights(reader, plan.kept, plan.tied, plan.notes)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent
