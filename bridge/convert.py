"""`convert`: a checkpoint from one framework's names and format to the other's, streamed, whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from easytorch.bridge.architecture import architecture_of, check
from easytorch.bridge.atomic import new_folder, refuse_existing
from easytorch.bridge.bits import identical
from easytorch.bridge.companions import copy_companions, set_config_dtype
from easytorch.bridge.dtypes import FLOATING, floating_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.families import Config, read_config, rules_for
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.base import Reader, TensorInfo, WritableFormat
from easytorch.bridge.plan import Plan, Step, copy_plan, plan_to_flax, plan_to_torch
from easytorch.bridge.rules import compile_rules
from easytorch.bridge.side import read_side_file, write_side_file
from easytorch.bridge.sizes import parse_size
from easytorch.bridge.transforms import transform_called

# Called with the tensor just written, the bytes written so far and the bytes in all.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did. `kept` are torch tensors stored beside the Flax weights, `tied` the repeats left out."""

    source: str
    destination: str
    source_format: str
    target_format: str
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
    progress: Progress | None = None,
) -> ConversionReport:
    """Writes the checkpoint `src` (a folder or a weight file) as a new folder `dst` in the format `to`: torch or flax.

    Floating point weights are cast to `dtype` when it is given and bit-exact otherwise. `verify` reads the result back
    and compares every tensor. Everything beside the weights (config, tokenizer) is copied.
    Raises `CheckpointError` for a checkpoint that cannot be converted and `ValueError` for an argument that is no such
    thing; `dst` is not there then.
    """
    begun = time.perf_counter()
    source, destination = Path(src), Path(dst)
    form, shard_size = registry.target(to), parse_size(max_shard_size)
    cast = None if dtype is None else floating_dtype(dtype)
    refuse_existing(destination)
    source_format, file = registry.find(source, prefer="flax" if form.naming == "torch" else "torch")
    config = read_config(source)
    with ExitStack() as stack:
        reader = stack.enter_context(source_format.open(file))
        job = _Job(reader, config, cast)
        job.plan_for(source_format.naming, form, stack)
        with new_folder(destination) as folder:
            files = job.write(folder, form, shard_size, progress)
            if verify:
                job.verify(folder, form)
            copy_companions(config.file.parent, folder)
            if cast is not None:
                set_config_dtype(folder / config.file.name, cast)
        targets = job.plan.targets.values()
        return ConversionReport(
            source=str(source),
            destination=str(destination),
            source_format=source_format.name,
            target_format=form.name,
            architecture=config.architecture,
            tensors=len(targets),
            bytes=sum(info.nbytes for info in targets),
            files=tuple(files),
            kept=tuple(job.plan.kept),
            tied=tuple(job.plan.tied),
            notes=tuple(job.plan.notes),
            verified=verify,
            seconds=time.perf_counter() - begun,
        )


class _Job:
    """One conversion: the open source, the plan, and where each source tensor is read."""

    def __init__(self, reader: Reader, config: Config, cast: str | None) -> None:
        if not reader.tensors:
            raise CheckpointError("holds no tensors", file=reader.files[0])
        self._config = config
        self._cast = cast
        self._home: dict[str, Reader] = dict.fromkeys(reader.tensors, reader)
        self._tensors = reader.tensors
        self.plan = Plan()

    def plan_for(self, naming: str, form: WritableFormat, stack: ExitStack) -> None:
        """Decides the steps and holds the checkpoint against the architecture of its config."""
        if naming == form.naming:
            self.plan = copy_plan(self._tensors)
        else:
            table = compile_rules(rules_for(self._config.model_type, self._config.file))
            architecture = architecture_of(self._config, len(self._tensors))
            if form.naming == "flax":
                fill = architecture.shapes if architecture.tie else ()
                self.plan = plan_to_flax(self._tensors, table, tie=architecture.tie, same=self._same, fill=fill)
                names = table.torch_names(self._tensors)
                weights = {name: self._tensors[given] for name, given in names.items() if not table.is_buffer(name)}
            else:
                self._plan_to_torch(table, architecture, stack)
                weights = {name: info for name, info in self.plan.targets.items() if not table.is_buffer(name)}
            check(weights, architecture, table)
        if self._cast is not None:
            self.plan.steps = [_cast(step, self._cast) for step in self.plan.steps]

    def _plan_to_torch(self, table: Any, architecture: Any, stack: ExitStack) -> None:
        side, tied = read_side_file(self._config.file.parent)
        kept: Mapping[str, TensorInfo] = {}
        if side is not None:
            stack.enter_context(side)
            kept = side.tensors
        plan = plan_to_torch(self._tensors, table, tie=architecture.tie, same=self._same, kept=kept, tied=tied)
        for name, info in kept.items():
            plan.steps.append(Step((name,), (info,), transform_called("identity"), False))
            self._home[name] = side
        self.plan = plan

    def _read(self, step: Step) -> list[np.ndarray]:
        return step.run([self._home[name].read(name) for name in step.sources])

    def _same(self, one: Step, other: Step) -> bool:
        if one.targets[0].shape != other.targets[0].shape or one.targets[0].dtype != other.targets[0].dtype:
            return False
        return identical(self._read(one)[0], self._read(other)[0])

    def write(self, folder: Path, form: WritableFormat, shard_size: int, progress: Progress | None) -> list[str]:
        """Writes the weights and the side file; gives the names of the weight files."""
        layout = form.layout(list(self.plan.targets.values()), shard_size)
        stream = self._stream([info for infos in layout.values() for info in infos], progress)
        form.write(folder, layout, stream)
        # The last tensor is reported when the stream is asked for one more.
        assert next(stream, None) is None, "the format left tensors unwritten"
        kept = {name: self._home[given].read(given) for name, given in self.plan.kept.items()}
        if form.naming == "flax":
            write_side_file(folder, kept, self.plan.tied)
        return list(layout)

    def _stream(self, infos: list[TensorInfo], progress: Progress | None) -> Iterator[np.ndarray]:
        makers = {info.name: (step, place) for step in self.plan.steps for place, info in enumerate(step.targets)}
        total, done = sum(info.nbytes for info in infos), 0
        for info in infos:
            step, place = makers[info.name]
            yield self._read(step)[place]
            done += info.nbytes
            if progress is not None:
                progress(info.name, done, total)

    def verify(self, folder: Path, form: WritableFormat) -> None:
        """Reads the written weights back and compares every tensor with what its source gives."""
        file = form.detect(folder)
        with form.open(file) as written:
            for step in self.plan.steps:
                for info, array in zip(step.targets, self._read(step), strict=True):
                    if not identical(written.read(info.name), array):
                        raise CheckpointError("was not written as it was read; check the disk", tensor=info.name)


def _cast(step: Step, dtype: str) -> Step:
    targets = tuple(replace(info, dtype=dtype) if info.dtype in FLOATING else info for info in step.targets)
    return replace(step, targets=targets)
