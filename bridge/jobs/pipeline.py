"""One conversion: an open source, its weights under the target's names, and the destination they are written to."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from easytorch.bridge.checkpoint import Checkpoint, NamedWeights
from easytorch.bridge.core.reader import TokenizedReader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.core.unsupported import note_on_narrow, refuse_adapter_beside, refuse_cast, refuse_quantized
from easytorch.bridge.core.version import version
from easytorch.bridge.dtypes import floating_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Layout, RoundingFormat, WritableFormat
from easytorch.bridge.formats.steps import step_folder
from easytorch.bridge.formats.torch_buffers import write_torch_buffers
from easytorch.bridge.jobs.aux_files import copy_aux_files, refuse_foreign_config, set_config_dtype
from easytorch.bridge.jobs.report import ConversionReport
from easytorch.bridge.jobs.sources import Progress, ReaderSource
from easytorch.bridge.jobs.targets import Target
from easytorch.bridge.jobs.verify import OutputCheck, compare_sides, wrong_tensor
from easytorch.bridge.jobs.verify_source import lost_tensor
from easytorch.bridge.jobs.writer import digest, write_files
from easytorch.bridge.rules.fingerprint import fingerprint
from easytorch.bridge.rules.plan import cast_plan
from easytorch.bridge.rules.planned_reader import PlannedReader
from easytorch.bridge.rules.table import Rules
from easytorch.bridge.schemes.registry import TORCH
from easytorch.bridge.storage.atomic import refuse_existing, staged, sweep

# What files of one format are called, and no folder of another.
_FILE_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".gguf", ".npz", ".easydel", ".h5", ".onnx", ".json")
)


class Conversion:
    """`source` and `destination` are local, wherever the user's are; `named.reader` gives the target's tensors."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Target,
        *,
        dtype: str | None,
        shard_size: int,
        source: Path,
        destination: Path,
        rules: Rules | None = None,
        drop: Collection[str] = (),
    ) -> None:
        for folder in (source, step_folder(source, checkpoint.reader.files[0])):
            refuse_adapter_beside(folder)
        if checkpoint.config is not None:
            refuse_foreign_config(checkpoint.config.file, source)
        self._notes: list[str] = []
        if dtype is not None and checkpoint.scheme == target.scheme == TORCH:
            if checkpoint.config is not None:
                refuse_quantized(checkpoint.config.content, checkpoint.config.file)
            refuse_cast(checkpoint.weights.tensors)
            self._notes += note_on_narrow(checkpoint.weights.tensors, ())
        self._checkpoint = checkpoint
        self._target = target
        self._dtype = dtype
        self._shard_size = shard_size
        self._source = source
        self._destination = destination
        self._format, self._cast = stored_as(target.format, dtype)
        self._rules = rules
        self._drop = sorted(drop)
        if rules is None:
            self._named: NamedWeights = checkpoint.in_scheme(target.scheme)
        else:
            self._named = checkpoint.by_rules(rules, target.scheme)
        if self._cast is not None:
            self._named.reader = PlannedReader(self._named.reader, cast_plan(self._named.reader.tensors, self._cast))
        self._layout: Layout = self._format.layout(list(self._named.reader.tensors.values()), shard_size)
        # The one file of the layout where the destination is a file, None where it is a folder.
        self._file = self._single_file()
        self._outputs = OutputCheck(None)
        self._digest = digest(checkpoint)

    def _single_file(self) -> str | None:
        suffix = self._format.suffix
        if self._destination.suffix != suffix and self._destination.suffix.lower() in _FILE_SUFFIXES:
            own = "a folder" if suffix is None else f"a folder, or a file named *{suffix}"
            raise CheckpointError(
                f"ends in {self._destination.suffix}, and {self._format.name} is written as {own}; give such a name",
                file=self._destination,
            )
        if self._source.is_dir() and self._destination.absolute().resolve().is_relative_to(self._source.resolve()):
            raise CheckpointError("stands inside the source; give a destination outside of it", file=self._destination)
        if suffix is None or self._destination.suffix != suffix:
            return None
        if len(self._layout) > 1:
            raise CheckpointError(
                f"the destination is one file, but the weights fill {len(self._layout)} of {self._shard_size} bytes; "
                "give a folder, or a larger max_shard_size",
                file=self._destination,
            )
        return next(iter(self._layout))

    def run(self, *, resume: bool, verify: bool, progress: Progress | None) -> None:
        """Writes the destination atomically."""
        config, reader = self._checkpoint.config, self._named.reader
        with staged(self._destination, self._file, key=self._key(), resume=resume) as staging:
            self._checkpoint.temp_arrays.folder = staging.folder.parent
            write_files(
                staging, self._format, self._layout, ReaderSource(reader, config, progress, self._checkpoint.reader)
            )
            self._refuse_changed()
            if verify and (name := wrong_tensor(staging.folder, self._format, reader)) is not None:
                raise CheckpointError("was not written as it was read; check the disk", tensor=name)
            if self._file is None:
                self._write_beside(staging.folder)
            if verify and self._rules is None:
                self._verify_source(staging.folder)
                # Weights rounded by a cast give other outputs.
                if self._file is None and self._dtype is None:
                    self._outputs = compare_sides(self._checkpoint, self._source, staging.folder, self._target.scheme)
        self._notes += [*staging.notes, *self._without_folder(), *filter(None, [self._outputs.note])]

    def _without_folder(self) -> list[str]:
        """A note on tensors that a folder would keep beside the weights, and a single file cannot."""
        if self._file is None or self._target.scheme == TORCH or not self._named.kept:
            return []
        names = ", ".join(self._named.kept)
        return [f"left out, as there is no folder to keep it in beside the file: {names}; give a folder to keep it"]

    def _verify_source(self, folder: Path) -> None:
        """Looks for every tensor of the source in what was written."""
        lost = lost_tensor(
            self._checkpoint,
            self._named,
            folder if self._file is None else folder / self._file,
            self._target.scheme,
            cast=self._cast,
            rounds=isinstance(self._format, RoundingFormat),
            whole=self._file is None,
        )
        if lost is not None:
            raise CheckpointError(f"{lost} from what was written", file=self._destination)

    def accept_existing(self) -> None:
        """Accepts an existing destination as the result; `CheckpointError` where it is something else."""
        found = self._format.detect(self._destination)
        if found is None or wrong_tensor(self._destination, self._format, self._named.reader) is not None:
            refuse_existing(self._destination)
        self._notes += sweep(self._destination)
        self._notes.append(f"{self._destination}: stands there already, and every tensor of it is right")

    def _refuse_changed(self) -> None:
        """Refuses a source that changed meanwhile: what was read is neither the old checkpoint nor the new one."""
        if digest(self._checkpoint) != self._digest:
            raise CheckpointError(
                "was changed while it was being converted; convert it again when nobody writes it",
                file=self._checkpoint.reader.files[0],
            )

    def _key(self) -> dict[str, Any]:
        """The key that must be equal for a run to resume the files of another."""
        config = self._checkpoint.config
        return {
            "source": self._digest,
            "config": None if config is None else config.content,
            "options": [self._format.name, self._target.scheme, self._dtype, self._shard_size, self._file],
            "drop": self._drop,
            "rules": None if self._rules is None else fingerprint(self._rules),
            "version": version(),
        }

    def _write_beside(self, folder: Path) -> None:
        """Writes config, tokenizer and other files, and the tensors that the scheme cannot hold."""
        checkpoint, named = self._checkpoint, self._named
        if self._target.scheme != TORCH:
            kept = {name: checkpoint.read_torch(given) for name, given in named.kept.items()}
            write_torch_buffers(folder, kept, named.tied)
        source = self._source if self._source.is_dir() else self._source.parent
        self._notes += copy_aux_files(source, folder, checkpoint.reader.files)
        if isinstance(checkpoint.reader, TokenizedReader) and self._target.scheme != checkpoint.scheme:
            self._notes += filter(None, [checkpoint.reader.write_tokenizer(folder)])
        if checkpoint.config is None:
            return
        file = folder / "config.json"
        if named.config is not None or not file.is_file():
            content = checkpoint.config.content if named.config is None else named.config
            file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if self._cast is not None:
            set_config_dtype(file, self._cast)

    def _written_bytes(self, info: TensorInfo) -> int:
        return self._format.stored_bytes(info) if isinstance(self._format, RoundingFormat) else info.nbytes

    def report(self, src: str, dst: str, *, verified: bool, seconds: float) -> ConversionReport:
        """The report of the conversion; `src` and `dst` as the user gave them."""
        config, tensors = self._checkpoint.config, self._named.reader.tensors
        return ConversionReport(
            source=src,
            destination=dst,
            source_format=self._checkpoint.format.name,
            source_scheme=self._checkpoint.scheme,
            target_format=self._target.format.name,
            target_scheme=self._target.scheme,
            architecture=None if config is None else config.architecture,
            tensors=len(tensors),
            bytes=sum(map(self._written_bytes, tensors.values())),
            files=tuple(self._layout) if self._file is None else (self._destination.name,),
            kept=tuple(self._named.kept) if self._file is None else (),
            tied=tuple(self._named.tied),
            notes=(*self._named.notes, *self._notes),
            verified=verified,
            outputs_difference=self._outputs.difference,
            seconds=seconds,
        )


def stored_as(format_: WritableFormat, dtype: str | None) -> tuple[WritableFormat, str | None]:
    """The format to write, and the dtype to cast to before; None for a format that rounds itself."""
    if dtype is None:
        return format_, None
    return (format_.storing(dtype), None) if isinstance(format_, RoundingFormat) else (format_, floating_dtype(dtype))
