"""Writes the files of a conversion into a staging folder, one by one, skipping those already finished."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from easytorch.bridge.checkpoint import Checkpoint
from easytorch.bridge.core.threads import Threads
from easytorch.bridge.formats.base import Layout, WritableFormat
from easytorch.bridge.formats.torch_buffers import FILE_NAME as SIDE_FILE
from easytorch.bridge.jobs.sources import ReaderSource
from easytorch.bridge.storage.atomic import Staging
from easytorch.bridge.storage.journal import Journal, state_of

if TYPE_CHECKING:
    from concurrent.futures import Future

# What configs and tokenizers are kept in.
_TEXTS = (".json", ".model", ".txt", ".jinja")


def write_files(staging: Staging, format_: WritableFormat, layout: Layout, source: ReaderSource) -> None:
    """Writes the files of `layout` that the journal does not list; each is synced while the next one is written."""
    journal = staging.journal
    assert journal is not None, "a conversion is staged with a key"
    with Threads(1) as syncing:
        unsynced: list[str] = []
        sync: Future[None] | None = None
        for file, infos in layout.items():
            if file in journal.finished:
                for info in infos:
                    source.wrote(info)
                continue
            format_.write(staging.folder, file, infos, source)
            unsynced.append(file)
            if sync is None or sync.done():
                sync = _next_sync(syncing, sync, journal, unsynced)
                unsynced = []
        _next_sync(syncing, sync, journal, unsynced).result()
    format_.finish(staging.folder, layout, source)


def _next_sync(syncing: Threads, former: Future[None] | None, journal: Journal, files: list[str]) -> Future[None]:
    """Begun when the former one ended well."""
    if former is not None:
        former.result()
    return syncing.submit(journal.finish, files)


def digest(checkpoint: Checkpoint) -> str:
    """Identifies a source: its files' names, sizes and times, and the tensors that their headers declare.

    Of the files beside the weights, tokenizers count, since some formats include them.
    """
    files = checkpoint.reader.files
    folder = files[0] if files[0].is_dir() else files[0].parent
    beside = sorted(file for file in folder.iterdir() if file.suffix in _TEXTS and file.is_file())
    states = [[file.name, state_of(file)] for file in (*files, folder / SIDE_FILE, *beside)]
    tensors = [[info.name, info.shape, info.dtype] for info in checkpoint.reader.tensors.values()]
    return hashlib.sha256(json.dumps([checkpoint.scheme, checkpoint.tree, states, tensors]).encode()).hexdigest()
