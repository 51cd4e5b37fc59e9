"""The contents of an Orbax checkpoint, from its metadata alone: the tree's folder, and the array of each leaf.

Source: orbax-checkpoint 0.12, `metadata/tree.py` (`_METADATA`), `checkpoint_manager.py` (step and item folders) and
for checkpoints from before `_METADATA`, the msgpack file `checkpoint` of early Orbax, whose leaves are arrays or
`PLACEHOLDER://name` for an array in the store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easytorch.bridge.core.json_files import read_json
from easytorch.bridge.core.mapped import MappedFile
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.msgpack_files.walk import Located, Tree, Walk

METADATA, CHECKPOINT_METADATA, MANIFEST, AGGREGATE = "_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "checkpoint"
STRINGS = "_strings.json"
_MARKERS = (METADATA, MANIFEST, AGGREGATE)
# Item folders by how likely they are to hold the model; others are only taken when they stand alone.
_ITEMS = ("default", "items", "params", "model_params", "model", "state", "train_state", "pytree")
_METADATA_LIMIT = 256 << 20
_PLACEHOLDER = "PLACEHOLDER://"
_UNFINISHED = ".orbax-checkpoint-tmp"
# Leaves that are no arrays, by what orbax calls them (`metadata/empty_values.py`).
_NO_ARRAYS = ("None", "Dict", "List", "Tuple", "NamedTuple")
# Everything else in the folder of a tree that is not one of the model's auxiliary files (config, tokenizer).
_OWN = (MANIFEST, CHECKPOINT_METADATA, AGGREGATE, STRINGS, "_sharding", "array_metadatas", "commit_success.txt", "d")
_OWN_PREFIXES = ("ocdbt.", "ocdbt_")
# A step's folder: `100`, `step_100`.
_STEP = re.compile(r"(?:^|_)(\d{1,18})$")


@dataclass
class Index:
    """The leaves of a tree by path: arrays in the store by their key there, and arrays inside the msgpack file.

    `all_stored`: every chunk was written, even one that is all zeros, so that a missing one is a loss.
    """

    stored: dict[str, str] = field(default_factory=dict)
    inline: dict[str, Located] = field(default_factory=dict)
    strings: dict[str, str] = field(default_factory=dict)
    all_stored: bool = False


def find_tree(path: Path) -> Path | None:
    """The folder that holds the tree of `path`: itself, its item, or that of its last step; None when there is none.

    Names only. A file of the checkpoint may be given in the folder's place.
    """
    if path.is_file():
        return path.parent if path.name in (METADATA, CHECKPOINT_METADATA, MANIFEST) else None
    if not path.is_dir() or _UNFINISHED in path.name:
        return None
    if any((path / marker).is_file() for marker in _MARKERS):
        return path
    if (item := _item(path)) is not None:
        return item
    steps = {int(found[1]): folder for folder in _folders(path) if (found := _STEP.search(folder.name))}
    for step in sorted(steps, reverse=True):
        if (tree := find_tree(steps[step])) is not None:
            return tree
    return None


def _item(path: Path) -> Path | None:
    items = {folder.name: folder for folder in _folders(path) if any((folder / one).is_file() for one in _MARKERS)}
    items = {name: folder for name, folder in items.items() if not _STEP.search(name)}
    for name in _ITEMS:
        if name in items:
            return items[name]
    if len(items) > 1 and (path / CHECKPOINT_METADATA).is_file():
        raise CheckpointError(f"holds several items ({', '.join(items)}); give the path of the one to use", file=path)
    return next(iter(items.values()), None) if (path / CHECKPOINT_METADATA).is_file() else None


def _folders(path: Path) -> Iterator[Path]:
    return (one for one in sorted(path.iterdir()) if one.is_dir() and _UNFINISHED not in one.name)


def own_paths(folder: Path, keys: Iterable[str]) -> list[Path]:
    """The paths that make up the checkpoint of the tree in `folder`, metadata first: files, stores, folders of `keys`.

    In a run's folder also the other items and steps, so that none of them is copied as an auxiliary file.
    """
    found = [folder / METADATA, *(folder / name for name in _OWN), *(folder / key.split("/")[0] for key in keys)]
    found += [path for path in sorted(folder.iterdir()) if path.name.startswith(_OWN_PREFIXES)]
    step = folder
    if (folder.parent / CHECKPOINT_METADATA).is_file():
        step = folder.parent
        found += [step / CHECKPOINT_METADATA, step / "commit_success.txt", *_folders(step)]
    if _STEP.search(step.name) and os.access(step.parent, os.R_OK):
        found += [path for path in step.parent.iterdir() if _STEP.search(path.name) and path != step]
    # Of a path that is too long `Path.exists` raises, and a key in a store may be longer than a file's name.
    return [path for path in dict.fromkeys(found) if os.path.exists(path)]


def read_index(folder: Path) -> Index:
    """The leaves of the tree in `folder`; an empty index where only the store itself knows them."""
    if (folder / METADATA).is_file():
        return _from_metadata(folder / METADATA, folder / STRINGS)
    if (folder / AGGREGATE).is_file():
        return _from_aggregate(folder / AGGREGATE)
    return Index()


def _from_metadata(file: Path, strings: Path) -> Index:
    content = read_json(file, limit=_METADATA_LIMIT)
    entries = content.get("tree_metadata")
    if not isinstance(entries, dict):
        raise CheckpointError("has no `tree_metadata`; copy the checkpoint again", file=file)
    index = Index(all_stored=content.get("store_array_data_equal_to_fill_value") is True)
    texts = read_json(strings, limit=_METADATA_LIMIT) if strings.is_file() else {}
    for label, entry in entries.items():
        keys, kind = _keys(entry), _kind(entry)
        if keys is None or kind is None:
            raise CheckpointError(f"the entry {label!r} has no keys or no type; copy the checkpoint again", file=file)
        path, stored = "/".join(keys), ".".join(keys)
        if kind in _NO_ARRAYS:
            continue
        if path in index.stored or path in index.strings:
            raise CheckpointError("two leaves of the tree read the same", file=file, tensor=path)
        if kind == "string":
            index.strings[path] = str(texts.get(stored, ""))
        else:
            index.stored[path] = stored
    return index


def _keys(entry: object) -> list[str] | None:
    """The keys from the root to a leaf; a sequence's are its numbers, as text."""
    listed = entry.get("key_metadata") if isinstance(entry, dict) else None
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        return None
    keys = [one.get("key") for one in listed]
    return keys if keys and all(isinstance(key, str) and key for key in keys) else None


def _kind(entry: dict[str, Any]) -> str | None:
    value = entry.get("value_metadata")
    kind = value.get("value_type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def _from_aggregate(file: Path) -> Index:
    mapped = MappedFile(file)
    try:
        tree = Walk(file, mapped.bytes, mapped.size).tree()
    finally:
        mapped.close()
    index = Index()
    _collect(tree, (), index, file)
    return index


def _collect(tree: Tree, path: tuple[str, ...], index: Index, file: Path) -> None:
    for key, child in tree.items():
        name = "/".join((*path, key))
        if isinstance(child, dict):
            _collect(child, (*path, key), index, file)
        elif isinstance(child, Located):
            index.inline[name] = child
        elif isinstance(child, str) and child.startswith(_PLACEHOLDER):
            index.stored[name] = child.removeprefix(_PLACEHOLDER)
        elif child is not None:
            index.strings[name] = str(child)
