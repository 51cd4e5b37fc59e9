"""Datasets of examples: JSON lines read here, everything else by the `datasets` package, in memory or streamed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from easytorch.bridge.errors import nearest
from easytorch.training.config import TrainingConfig, flag

Example = dict[str, Any]


class Examples:
    """The examples of `config.dataset`, in an order that the seed decides.

    Read from the beginning or from any example on: of a stream the ones before it are read and passed over.
    """

    def __init__(self, config: TrainingConfig) -> None:
        assert config.dataset is not None
        self.name, self.streaming = config.dataset, config.streaming
        self._data = _open(config)
        if self.streaming and config.shuffle_buffer > 1:
            self._data = self._data.shuffle(seed=config.seed, buffer_size=config.shuffle_buffer)

    def __iter__(self) -> Iterator[Example]:
        return self.read(0, 0)

    def read(self, epoch: int, start: int) -> Iterator[Example]:
        """The examples of an epoch from number `start` on. A stream is shuffled again in each epoch."""
        if not self.streaming:
            for number in range(start, len(self._data)):
                yield self._data[number]
            return
        rest = self._data.skip(start) if start else self._data
        rest.set_epoch(epoch)  # which `skip` does not pass on
        yield from rest

    def fingerprint(self) -> str:
        """A hash of the examples in order; of a stream, which is not read twice, of its name."""
        digest = hashlib.sha256()
        if self.streaming:
            digest.update(self.name.encode())
            return digest.hexdigest()
        for example in self:
            data = json.dumps(example, sort_keys=True, default=str).encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()


def _open(config: TrainingConfig) -> Any:
    path = Path(str(config.dataset))
    where = f"{flag('dataset')} {config.dataset}"
    lines = path.suffix in (".jsonl", ".json")
    if lines and not path.is_file():
        raise FileNotFoundError(f"{flag('dataset')}: there is no file {config.dataset!r}")
    if lines and not config.streaming:
        return _json_lines(path)
    import datasets

    try:
        if lines:
            return datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
        if path.is_dir() and any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
            found: Any = datasets.load_from_disk(str(path))
            if isinstance(found, dict):
                if config.dataset_split not in found:
                    known = ", ".join(found)
                    raise ValueError(f"it has no split {config.dataset_split!r}; it has {known}")
                found = found[config.dataset_split]
            return found.to_iterable_dataset() if config.streaming else found
        return datasets.load_dataset(str(path), split=config.dataset_split, streaming=config.streaming)
    except (ValueError, OSError) as error:
        raise type(error)(f"{where}: {error}") from error
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(f"{where}: {error}") from error


def _json_lines(path: Path) -> list[Example]:
    where = f"{flag('dataset')}: {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from error
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}, line {number} is not JSON: {error}") from error
        if not isinstance(example, dict):
            raise ValueError(f"{where}, line {number} must be a JSON object, got a {type(example).__name__}")
        found.append(example)
    if not found:
        raise ValueError(f"{where} has no examples")
    return found


def need_columns(example: Example, name: str, *columns: str) -> None:
    """`ValueError` where an example lacks one of these."""
    for column in columns:
        if column not in example:
            have = ", ".join(example)
            raise ValueError(f"{flag('dataset')} {name}: no {column!r}{nearest(column, example)}; it has {have}")
