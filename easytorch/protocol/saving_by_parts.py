"""Models over a mesh written as one process would write them, without one that holds them: the ranks share the files.

Each file is written by one rank, which gathers its tensors one after the other. All is written into a folder beside the
destination, whose place it takes when every rank is done.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import _add_variant

from easytorch.bridge.checkpoint import Checkpoint
from easytorch.bridge.core.config import Config
from easytorch.bridge.core.in_parts import read_in_parts
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.sizes import parse_size
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Layout, WritableFormat
from easytorch.bridge.formats.orbax_trees.index import MANIFEST, METADATA, own_paths, read_index
from easytorch.bridge.formats.torch_buffers import write_torch_buffers
from easytorch.bridge.jobs.sources import ReaderSource
from easytorch.bridge.jobs.targets import target
from easytorch.bridge.rules.plan import cast_plan
from easytorch.bridge.rules.planned_reader import PlannedReader
from easytorch.bridge.schemes.registry import TORCH
from easytorch.bridge.storage.atomic import staged
from easytorch.bridge.storage.fsync import flush, os_error_of
from easytorch.distributed.gathering import Gathering, OtherRankStoppedError, Request
from easytorch.distributed.shards import ShardsFailedError, model_tensors, save_shards
from easytorch.distributed.together import RankFailedError, RankLostError, cpu_group, exchanged, rank_in, together
from easytorch.protocol.conversion import plain_config
from easytorch.protocol.hub_reader import Everywhere, HubReader, InTurn, Recorded, requests
from easytorch.protocol.saved_names import SavedNames

FORMATS = ("torch", "flax", "flax-safetensors", "orbax", "orbax-zarr")
_TIES = "tie_word_embeddings"
_MADE = ".saved"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(
    r"(shard-\d+-)?(model|flax_model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|msgpack|bin)(\.index\.json)?"
)


def save_by_parts(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    mesh: Any = None,
    to: str = "torch",
    max_shard_size: int | str = "50GB",
    dtype: torch.dtype | None = None,
    original: bool = True,
    variant: str | None = None,
    shards: bool = False,
) -> None:
    """Write `model` into `directory`. Each rank of `mesh` calls this; without one the process writes all.

    What else is in the folder stays, but for the weights of an earlier save; a folder whose place no other can take (a
    mount, the working directory) gets the files one by one when all are written. Ranks that do not see the folder's
    disk send their parts and write nothing. An error leaves the folder as it was, and is the same `CheckpointError` in
    each rank. to: of `FORMATS`, as in `easytorch.bridge.convert`. max_shard_size: of a file; a larger tensor has
    one of its own. dtype: of the floating point tensors in the files. original: whether tensors have the names that
    checkpoints on the Hub have. variant: of torch's, in the files' names; weights under other names stay. shards: each
    rank writes its own part of each tensor, under the model's own names, and nothing is gathered: a folder of
    torch.distributed.checkpoint's safetensors, which `from_pretrained` and `easytorch convert` read.
    """
    if to not in FORMATS:
        raise ValueError(f"to={to!r} must be one of {', '.join(FORMATS)}; `easytorch convert` writes the others")
    size = parse_size(max_shard_size)
    if to != "torch" and not original:
        raise ValueError("save_original_format=False is of torch's names: a tree has names of its own")
    if to != "torch" and variant is not None:
        raise ValueError("variant is of torch's names: a tree has names of its own")
    given = Path(directory)
    with cpu_group(mesh) as group:
        with _readable_errors(given, group):
            path: Path = together(group, lambda: _place(given))[0]
        with _readable_errors(path, group):
            if shards:
                saving: _Saving = _Shards(model, path, group, variant)
            else:
                saving = _Files(model, path, group, variant, to, size, dtype, original)
        saving.run()


@dataclass
class _Planned:
    """What is written: the tensors under their names in the files, which file has which, and who writes it."""

    reader: Reader
    format: WritableFormat
    layout: Layout
    finish: Callable[[Path, ReaderSource], None]
    beside: tuple[str, ...] = ()  # names on disk of tensors that are kept in a file beside the tree
    tied: tuple[str, ...] = ()
    untied: bool = False  # whether config.json must say so


class _Saving(ABC):
    """A folder that all ranks write the tensors into, and the first one what is beside them."""

    def __init__(self, model: Any, path: Path, group: Any, variant: str | None) -> None:
        self.model, self.path, self.group, self.variant = model, path, group, variant
        self.first = rank_in(group) == 0

    def run(self) -> None:
        with ExitStack() as staging, _readable_errors(self.path, self.group):
            self.stays = any(exchanged(self.group, _stays(self.path)))
            folder = self._staging_folder(staging)
            self._write(folder)
            together(self.group, lambda: self._complete(folder) if self.first else None)
            # renamed before any rank goes on
            together(self.group, lambda: self._publish(staging) if self.first else None)

    def _staging_folder(self, staging: ExitStack) -> Path:
        made = self.path / _MADE if self.stays else self.path

        def enter() -> Path | None:
            return staging.enter_context(staged(made, replace=True)).folder if self.first else None

        folder = together(self.group, enter)[0]
        assert isinstance(folder, Path)
        return folder

    @abstractmethod
    def _write(self, folder: Path) -> None:
        """The tensors, by all ranks together."""

    def _complete(self, folder: Path) -> None:
        """In the first rank: everything but the tensors, and what of the destination stays."""
        _write_config(self.model, folder)
        self._finish(folder)
        if not self.stays:
            _carry_over(self.path, folder, self.variant)

    @abstractmethod
    def _finish(self, folder: Path) -> None:
        """In the first rank: what else belongs to the tensors, and what config.json has to say of them."""

    def _publish(self, staging: ExitStack) -> None:
        staging.close()
        if self.stays:
            _move_into(self.path / _MADE, self.path, self.variant)


class _Shards(_Saving):
    """Each rank writes its own part of each tensor."""

    def _write(self, folder: Path) -> None:
        save_shards(model_tensors(self.model), folder, lambda: None, group=self.group)

    def _finish(self, folder: Path) -> None:
        """The shards say all of themselves."""


class _Files(_Saving):
    """Each file is written by one rank, with the names and places that one process gives its tensors."""

    def __init__(
        self,
        model: Any,
        path: Path,
        group: Any,
        variant: str | None,
        to: str,
        size: int,
        dtype: torch.dtype | None,
        original: bool,
    ) -> None:
        super().__init__(model, path, group, variant)
        self.to, self.size, self.dtype = to, size, dtype
        # FSDP2 frees what an evaluation has left gathered when it is asked for a state dict
        self.gathering = Gathering(model.state_dict(keep_vars=True), group)
        self.names = SavedNames(model, self.gathering.tensors, original=original)
        infos = self.names.infos()
        self.hub = HubReader(infos, path, Everywhere(self.names, self.gathering))

    def _write(self, folder: Path) -> None:
        self.planned = self._torch() if self.to == "torch" else self._tree()
        self._write_files(folder, self.planned)

    def _finish(self, folder: Path) -> None:
        file = folder / "config.json"
        if self.dtype is not None or self.planned.untied:
            content = json.loads(file.read_text(encoding="utf-8"))
            if self.planned.untied:
                content = _untied(content)
            if self.dtype is not None:
                content["dtype"] = _name_of(self.dtype)
            file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        self.planned.finish(folder, ReaderSource(self.planned.reader, None))

    def _torch(self) -> _Planned:
        reader: Reader = self.hub
        if self.dtype is not None:
            reader = PlannedReader(reader, cast_plan(reader.tensors, _name_of(self.dtype)))
        stem = "model" if self.variant is None else f"model.{self.variant}"
        files = self.names.files(stem + "{suffix}.safetensors", self.size, self.dtype)
        format_ = target("torch").format
        order = format_.layout(list(reader.tensors.values()), 1 << 62)
        place = {info.name: number for infos in order.values() for number, info in enumerate(infos)}
        layout = {
            file: [reader.tensors[name] for name in sorted(names, key=place.__getitem__)]
            for file, names in files.items()
        }

        def finish(folder: Path, source: ReaderSource) -> None:
            if len(layout) > 1:
                total = sum(info.nbytes for infos in layout.values() for info in infos)
                content = {
                    "metadata": {"total_parameters": self.names.parameters, "total_size": total},
                    "weight_map": {name: file for file, names in files.items() for name in names},
                }
                text = json.dumps(content, indent=2, sort_keys=True) + "\n"
                (folder / _add_variant(_INDEX, self.variant)).write_text(text, encoding="utf-8")

        return _Planned(reader, format_, layout, finish)

    def _tree(self) -> _Planned:
        goal = target(self.to)
        config = plain_config(self.model.config).to_dict()
        config["architectures"] = [_class_name(self.model)]
        source = Checkpoint(goal.format, self.hub, TORCH, Config(self.path / "config.json", config))
        named = source.in_scheme(goal.scheme)
        reader = named.reader
        if self.dtype is not None:
            reader = PlannedReader(reader, cast_plan(reader.tensors, _name_of(self.dtype)))
        infos = list(reader.tensors.values())
        size = self.size
        if self.to == "orbax":  # a store for each rank
            size = min(size, -(-sum(info.nbytes for info in infos) // self.gathering.ranks))
        layout = goal.format.layout(infos, size)

        def finish(folder: Path, source: ReaderSource) -> None:
            goal.format.finish(folder, layout, source)

        kept, tied = tuple(named.kept.values()), tuple(named.tied)
        return _Planned(reader, goal.format, layout, finish, kept, tied, named.config is not None)

    def _write_files(self, folder: Path, planned: _Planned) -> None:
        """Each rank its files; all take part until the last one is written."""
        seen = exchanged(self.group, _sees(folder))
        own = _shared(planned.layout, [rank for rank, sees in enumerate(seen) if sees], len(seen))
        reads = [self._reads(planned, files, beside=rank == 0) for rank, files in enumerate(own)]
        wanted: list[list[Request]] = [requests(names, self.names) for names in reads]
        rounds = self.gathering.rounds(wanted)
        mine = self.gathering.rank
        self.hub.take = InTurn(reads[mine], self.names, rounds)

        def write() -> None:
            source = ReaderSource(planned.reader, None)
            try:
                for file in own[mine]:
                    planned.format.write(folder, file, planned.layout[file], source)
                if self.first:
                    kept = {name: np.array(self.hub.read(name)) for name in planned.beside}
                    write_torch_buffers(folder, kept, planned.tied)
                flush(one for file in own[mine] if (one := folder / file).exists())
            except (OtherRankStoppedError, RankLostError):
                raise
            except BaseException:
                rounds.stop()
                raise
            rounds.finish()

        def unless_another_stopped() -> None:
            with suppress(OtherRankStoppedError):  # that rank says why
                write()

        together(self.group, unless_another_stopped)

    def _reads(self, planned: _Planned, files: Sequence[str], *, beside: bool) -> list[str]:
        """The names on disk that writing these files reads, in order."""
        recorded = self.hub.take = Recorded(self.hub.tensors)
        for file in files:
            for info in planned.layout[file]:
                read_in_parts(planned.reader, info.name)
        planned.reader.close()  # drops what was made of zeros
        return [*recorded.names, *(planned.beside if beside else ())]


def _write_config(model: Any, folder: Path) -> None:
    """What `save_pretrained` of transformers writes beside the weights."""
    model.config.dtype = _name_of(model.dtype)
    model.config.architectures = [_class_name(model)]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _class_name(model: Any) -> str:
    """FSDP2 puts its name before that of a class."""
    return type(model).__name__.removeprefix("FSDP")


def _shared(layout: Layout, writers: Sequence[int], ranks: int) -> list[list[str]]:
    """Each rank's files: the largest first to whom has the least to write."""
    filled = dict.fromkeys(writers, 0)
    own: list[list[str]] = [[] for _ in range(ranks)]
    sizes = {file: sum(info.nbytes for info in infos) for file, infos in layout.items()}
    for file in sorted(sizes, key=lambda one: (-sizes[one], one)):
        rank = min(writers, key=lambda one: (filled[one], one))
        own[rank].append(file)
        filled[rank] += sizes[file]
    return [sorted(files) for files in own]


def _place(directory: Path) -> Path:
    """Where a folder is, behind a link."""
    path = os.path.abspath(directory)
    return Path(os.path.realpath(path) if os.path.islink(path) else path)


def _sees(folder: Path) -> bool:
    """Whether this rank can look into a folder."""
    with suppress(OSError):
        return folder.is_dir()
    return False


def _weights_of(folder: Path, variant: str | None) -> set[str]:
    """The names in a folder that an earlier save of weights has left, in whichever format; of a variant its own."""
    if variant is not None:
        one = re.escape(variant)
        own = re.compile(rf"model\.{one}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index\.{one}\.json")
        return {entry.name for entry in folder.iterdir() if own.fullmatch(entry.name)}
    names = {entry.name for entry in folder.iterdir() if _WEIGHTS.fullmatch(entry.name)}
    if any((folder / marker).is_file() for marker in (METADATA, MANIFEST)):
        keys: list[str] = []
        with suppress(CheckpointError):  # damaged
            keys += read_index(folder).stored.values()
        names |= {entry.name for entry in own_paths(folder, keys) if entry.parent == folder}
    return names


def _carry_over(old: Path, new: Path, variant: str | None) -> None:
    """What a folder holds beside the weights of an earlier save, as links where the disk has them."""
    if not old.is_dir():
        return
    weights = _weights_of(old, variant)
    for entry in old.iterdir():
        if entry.name in weights or os.path.lexists(new / entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=_link)
        elif entry.is_symlink():
            (new / entry.name).symlink_to(os.readlink(entry))
        else:
            _link(entry, new / entry.name)


def _stays(path: Path) -> bool:
    """Whether a folder cannot be exchanged for another."""
    if not _sees(path):
        return False
    if os.path.ismount(path) or not os.access(path.parent, os.W_OK):
        return True
    with suppress(OSError):  # the working directory may be gone
        return Path.cwd().is_relative_to(path)
    return False


def _move_into(made: Path, folder: Path, variant: str | None) -> None:
    """Files of weights first, their index last, then what is left of an earlier save goes."""
    names = sorted((entry.name for entry in made.iterdir()), key=lambda name: (".index." in name, name))
    before = _weights_of(folder, variant)
    for name in names:
        if (folder / name).is_dir() or (made / name).is_dir():
            _remove(folder / name)
        (made / name).replace(folder / name)
    made.rmdir()
    for name in before.difference(names):
        _remove(folder / name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _link(old: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
    try:
        os.link(old, new)
    except OSError:
        shutil.copy2(old, new)


def _untied(content: dict[str, Any]) -> dict[str, Any]:
    """config.json's content that says in every sub-config too that no weights are tied."""
    inside = {name: _untied(one) if _TIES in one else one for name, one in content.items() if isinstance(one, dict)}
    return {**content, **inside, _TIES: False}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _readable_errors(path: Path, group: Any) -> Iterator[None]:
    """Turns the error of any rank into one `CheckpointError`, the same in each."""
    try:
        yield
    except RankLostError as error:
        raise CheckpointError(f"cannot be written: {error}", file=path) from error
    except (RankFailedError, ShardsFailedError) as error:
        failed = {error.rank: error.cause} if isinstance(error, RankFailedError) else error.causes
        rank, cause = min(failed.items())
        where = "" if group is None else f" (rank {rank})"
        if isinstance(cause, Exception) and (found := os_error_of(cause)) is not None:
            raise CheckpointError(f"cannot be written: {found.strerror or found}{where}", file=path) from error
        text = str(cause)
        raise CheckpointError(f"{text}{where}", file=None if str(path) in text else path) from error
