"""`convert`: a checkpoint from one framework's names and format to the other's, streamed, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from easytorch import __version__
from easytorch.bridge.atomic import Staging, refuse_existing, staged, sweep
from easytorch.bridge.callable_module import call_as
from easytorch.bridge.checkpoint import Checkpoint, Renamed, open_checkpoint
from easytorch.bridge.companions import copy_companions, set_config_dtype
from easytorch.bridge.dtypes import floating_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.base import Layout, Reader, RoundingFormat, WritableFormat
from easytorch.bridge.journal import Journal, state_of
from easytorch.bridge.locations import is_remote, local_destination, local_source
from easytorch.bridge.plan import cast_plan
from easytorch.bridge.planned import PlannedReader
from easytorch.bridge.schemes.registry import TORCH
from easytorch.bridge.side import FILE_NAME as SIDE_FILE
from easytorch.bridge.side import write_side_file
from easytorch.bridge.sizes import parse_size
from easytorch.bridge.source import Progress, ReaderSource
from easytorch.bridge.verify import OutputCheck, compare_sides, wrong_tensor

# What configs and tokenizers are kept in.
_TEXTS = (".json", ".model", ".txt", ".jinja")


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did. `kept` are torch tensors stored beside a tree, `tied` the repeats left out.

    `verified`: every tensor was read back. `outputs_difference`: what torch and jax computed from the two sides, the
    largest difference relative to the largest output; None where that was not asked for or could not be done.
    """

    source: str
    destination: str
    source_format: str
    source_scheme: str
    target_format: str
    target_scheme: str
    architecture: str | None
    tensors: int
    bytes: int
    files: tuple[str, ...]
    kept: tuple[str, ...]
    tied: tuple[str, ...]
    notes: tuple[str, ...]
    verified: bool
    outputs_difference: float | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def convert(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    to: str,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    verify: bool = False,
    resume: bool = False,
    scheme: str | None = None,
    config: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Writes the checkpoint `src` as `dst` in the format `to` (`registry.TARGETS`).

    Both are paths, names on the Hub or URLs (`bridge.locations`). `dst` is a new folder, or one file where its name
    ends as such a file's does (`out.safetensors`). Floating point weights are cast to `dtype` when it is given and
    bit-exact otherwise. `verify` reads the result back, compares every tensor, and where a jax forward exists runs
    both sides on the same inputs. Everything beside the weights (config, tokenizer) is copied into a folder. `scheme`
    names the source's naming scheme where its names do not tell it, `config` is the config.json of a source that has
    none. `resume` goes on from the files a killed run of this very conversion had finished; an interrupted one keeps
    them.
    Raises `CheckpointError` for a checkpoint that cannot be converted and `ValueError` for an argument that is no such
    thing; `dst` is not there then.
    """
    begun = time.perf_counter()
    target, shard_size = registry.target(to), parse_size(max_shard_size)
    form, cast = _stored_as(target.form, dtype)
    if resume and is_remote(dst):
        raise ValueError(f"a conversion to {dst} cannot be resumed; convert to a folder here and copy that")
    prefer: registry.Kind = "tree" if to == "torch" else "torch"
    with local_source(src, prefer=prefer) as source, local_destination(dst) as destination:
        if not resume:
            refuse_existing(destination)
        with open_checkpoint(source, prefer=prefer, scheme=scheme, config=config) as checkpoint:
            renamed = checkpoint.renamed(target.scheme)
            if cast is not None:
                renamed.reader = PlannedReader(renamed.reader, cast_plan(renamed.reader.tensors, cast))
            tensors = renamed.reader.tensors
            layout = form.layout(list(tensors.values()), shard_size)
            whole_file = form.suffix is not None and destination.suffix == form.suffix
            if whole_file and len(layout) > 1:
                raise CheckpointError(
                    f"one file is asked for, and the weights fill {len(layout)} of {max_shard_size}; "
                    "give a folder, or a larger max_shard_size",
                    file=destination,
                )
            file = next(iter(layout)) if whole_file else None
            outputs = OutputCheck(None)
            if resume and os.path.lexists(destination):
                _refuse_another(destination, form, renamed.reader)
                notes = [*sweep(destination), f"{destination}: stands there already, and every tensor of it is right"]
            else:
                key = {
                    "source": _digest(checkpoint),
                    "config": None if checkpoint.config is None else checkpoint.config.content,
                    "options": [to, dtype, shard_size, file],
                    "version": __version__,
                }
                with staged(destination, file, key=key, resume=resume) as staging:
                    _write(staging, form, layout, ReaderSource(renamed.reader, checkpoint.config, progress))
                    if verify and (name := wrong_tensor(staging.folder, form, renamed.reader)) is not None:
                        raise CheckpointError("was not written as it was read; check the disk", tensor=name)
                    if not whole_file:
                        _write_beside(staging.folder, source, checkpoint, renamed, target.scheme, cast)
                        if verify and dtype is None:
                            outputs = compare_sides(checkpoint, source, staging.folder, target.scheme)
                notes = [*staging.notes, *filter(None, [outputs.note])]
            return ConversionReport(
                source=str(src),
                destination=str(dst),
                source_format=checkpoint.form.name,
                source_scheme=checkpoint.scheme,
                target_format=target.form.name,
                target_scheme=target.scheme,
                architecture=None if checkpoint.config is None else checkpoint.config.architecture,
                tensors=len(tensors),
                bytes=sum(info.nbytes for info in tensors.values()),
                files=(destination.name,) if whole_file else tuple(layout),
                kept=tuple(renamed.kept),
                tied=tuple(renamed.tied),
                notes=(*renamed.notes, *notes),
                verified=verify,
                outputs_difference=outputs.difference,
                seconds=time.perf_counter() - begun,
            )


def _stored_as(form: WritableFormat, dtype: str | None) -> tuple[WritableFormat, str | None]:
    """The format to write, and what to cast to before: nothing for a format that rounds on its own."""
    if dtype is None:
        return form, None
    return (form.storing(dtype), None) if isinstance(form, RoundingFormat) else (form, floating_dtype(dtype))


def _write_beside(
    folder: Path, source: Path, checkpoint: Checkpoint, renamed: Renamed, scheme: str, cast: str | None
) -> None:
    """Config, tokenizer and the like, and what the scheme has no place for."""
    if scheme != TORCH:
        write_side_file(
            folder, {name: checkpoint.read_torch(given) for name, given in renamed.kept.items()}, renamed.tied
        )
    copy_companions(source if source.is_dir() else source.parent, folder, checkpoint.reader.files)
    config = checkpoint.config
    if config is None:
        return
    file = folder / "config.json"
    if not file.is_file():
        file.write_text(json.dumps(config.content, indent=2) + "\n", encoding="utf-8")
    if cast is not None:
        set_config_dtype(file, cast)


def _write(staging: Staging, form: WritableFormat, layout: Layout, source: ReaderSource) -> None:
    """Writes the files of `layout` that no killed run has finished; they are synced while the next ones are written."""
    journal = staging.journal
    assert journal is not None
    with ThreadPoolExecutor(1) as syncing:
        unsynced: list[str] = []
        sync: Future | None = None
        for file, infos in layout.items():
            if file in journal.finished:
                for info in infos:
                    source.wrote(info)
                continue
            form.write(staging.folder, file, infos, source)
            unsynced.append(file)
            if sync is None or sync.done():
                sync = _started(syncing, sync, journal, unsynced)
                unsynced = []
        _started(syncing, sync, journal, unsynced).result()
    form.finish(staging.folder, layout, source)


def _started(syncing: ThreadPoolExecutor, former: Future | None, journal: Journal, files: list[str]) -> Future:
    """The next sync, begun when the former one ended well."""
    if former is not None:
        former.result()
    return syncing.submit(journal.finish, files)


def _digest(checkpoint: Checkpoint) -> str:
    """Tells one source from another: its files' names, sizes and times, and the tensors that their headers declare.

    Of what stands beside the weights, those files count that some format writes into its own: tokenizers.
    """
    files = checkpoint.reader.files
    folder = files[0] if files[0].is_dir() else files[0].parent
    beside = sorted(file for file in folder.iterdir() if file.suffix in _TEXTS and file.is_file())
    states = [[file.name, state_of(file)] for file in (*files, folder / SIDE_FILE, *beside)]
    tensors = [[info.name, info.shape, info.dtype] for info in checkpoint.reader.tensors.values()]
    return hashlib.sha256(json.dumps([checkpoint.scheme, states, tensors]).encode()).hexdigest()


def _refuse_another(destination: Path, form: WritableFormat, reader: Reader) -> None:
    """`CheckpointError` for what stands at `destination`, unless it is what would be written there."""
    if form.detect(destination) is None or wrong_tensor(destination, form, reader) is not None:
        refuse_existing(destination)


call_as(convert)
