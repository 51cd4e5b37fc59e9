"""`convert`: a checkpoint from one framework's names and format to the other's, streamed, whole or not at all."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from easytorch.bridge.atomic import new_file, new_folder, refuse_existing
from easytorch.bridge.bits import identical
from easytorch.bridge.callable_module import call_as
from easytorch.bridge.checkpoint import Checkpoint, Renamed, open_checkpoint
from easytorch.bridge.companions import copy_companions, set_config_dtype
from easytorch.bridge.dtypes import floating_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.base import Reader, WritableFormat
from easytorch.bridge.locations import is_remote, local_destination, local_source
from easytorch.bridge.plan import cast_plan
from easytorch.bridge.planned import PlannedReader
from easytorch.bridge.schemes.registry import TORCH
from easytorch.bridge.side import write_side_file
from easytorch.bridge.sizes import parse_size
from easytorch.bridge.source import Progress, ReaderSource


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did. `kept` are torch tensors stored beside a tree, `tied` the repeats left out."""

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
    bit-exact otherwise. `verify` reads the result back and compares every tensor. Everything beside the weights
    (config, tokenizer) is copied into a folder. `scheme` names the source's naming scheme where its names do not tell
    it, `config` is the config.json of a source that has none.
    Raises `CheckpointError` for a checkpoint that cannot be converted and `ValueError` for an argument that is no such
    thing; `dst` is not there then.
    """
    begun = time.perf_counter()
    target, shard_size = registry.target(to), parse_size(max_shard_size)
    cast = None if dtype is None else floating_dtype(dtype)
    if resume and is_remote(dst):
        raise ValueError(f"a conversion to {dst} cannot be resumed; convert to a folder here and copy that")
    prefer: registry.Kind = "tree" if to == "torch" else "torch"
    with local_source(src, prefer=prefer) as source, local_destination(dst) as destination:
        refuse_existing(destination)
        with open_checkpoint(source, prefer=prefer, scheme=scheme, config=config) as checkpoint:
            renamed = checkpoint.renamed(target.scheme)
            if cast is not None:
                renamed.reader = PlannedReader(renamed.reader, cast_plan(renamed.reader.tensors, cast))
            tensors = renamed.reader.tensors
            layout = target.form.layout(list(tensors.values()), shard_size)
            whole_file = target.form.suffix is not None and destination.suffix == target.form.suffix
            if whole_file and len(layout) > 1:
                raise CheckpointError(
                    f"one file is asked for, and the weights fill {len(layout)} of {max_shard_size}; "
                    "give a folder, or a larger max_shard_size",
                    file=destination,
                )
            with new_file(destination, next(iter(layout))) if whole_file else new_folder(destination) as folder:
                data = ReaderSource(renamed.reader, checkpoint.config, progress)
                for file, infos in layout.items():
                    target.form.write(folder, file, infos, data)
                target.form.finish(folder, layout, data)
                if verify:
                    _verify(folder, target.form, renamed.reader)
                if not whole_file:
                    _write_beside(folder, source, checkpoint, renamed, target.scheme, cast)
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
                notes=tuple(renamed.notes),
                verified=verify,
                seconds=time.perf_counter() - begun,
            )


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


def _verify(folder: Path, form: WritableFormat, reader: Reader) -> None:
    """Reads the written weights back and compares every tensor with what its source gives."""
    file = form.detect(folder)
    assert file is not None, f"{form.name} does not find what it has written"
    with form.open(file) as written:
        for name, info in reader.tensors.items():
            if not identical(written.read(name), form.reads_back(info, reader.read(name))):
                raise CheckpointError("was not written as it was read; check the disk", tensor=name)


call_as(convert)
