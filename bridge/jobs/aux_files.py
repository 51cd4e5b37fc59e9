"""Files beside the weights that are copied: config, tokenizer, generation settings, model card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from easytorch.bridge.core.unsupported import ADAPTER_CONFIG, adapter_in
from easytorch.bridge.core.weight_files import is_weights
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.steps import step_folder, steps_in

# What transformers keeps beside weights and config.json.
_OF_MODELS = frozenset(
    (
        *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
        *("vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
        *("chat_template.jinja", "chat_template.json", "generation_config.json"),
        *("preprocessor_config.json", "processor_config.json", "image_processor_config.json"),
    )
)


def copy_aux_files(source: Path, destination: Path, weights: Iterable[Path]) -> list[str]:
    """Copies every file of the folder `source` that is not weights, subfolders and all; notes on what is left out.

    weights: files and folders of the checkpoint itself. Hidden names are left out: they are caches and version control.
    Links are followed only to files in the folder: an untrusted checkpoint may link to any file of the user's.
    Of a run's steps the files of the one that is read are copied, to their places in a model's folder.
    A folder without config.json is not a model's: beside a weight file there, only files that models usually have
    are copied.
    """
    listed = list(weights)
    if (
        listed
        and listed[0].is_file()
        and not (source / "config.json").is_file()
        and step_folder(source, listed[0]) is None
    ):
        others = [path for path in source.iterdir() if path.name not in _OF_MODELS]
        return _copy(source, destination, [*listed, *others])
    step = step_folder(source, listed[0]) if listed else None
    if step is None:
        return _copy(source, destination, listed)
    notes = _copy(source, destination, [*listed, *steps_in(source).values()])
    return [*notes, *_copy(step, destination, listed)]


def _copy(source: Path, destination: Path, left: Iterable[Path]) -> list[str]:
    """Copies the files of `source` except those in `left`."""
    notes: list[str] = []
    left_out = {path.resolve() for path in left}
    if source.resolve() in left_out:
        return notes
    for parent, folders, files in os.walk(source):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and Path(parent, name).resolve() not in left_out
        )
        if Path(parent) != source and adapter_in(Path(parent)) is not None:
            notes.append(f"{parent} is left out: it is an adapter (PEFT), which is not converted; merge it first")
            folders.clear()
            continue
        notes += [
            f"{Path(parent, name)} is left out: it is a link to a folder; copy that there"
            for name in folders
            if Path(parent, name).is_symlink()
        ]
        for name in sorted(files):
            file = Path(parent, name)
            if name.startswith(".") or name == ADAPTER_CONFIG or is_weights(name):
                continue
            if not file.is_file():
                kind = "a link to nothing" if file.is_symlink() else "no regular file"
                notes.append(f"{file} is left out: it is {kind}")
                continue
            if file.resolve() in left_out:
                continue
            if not stands_inside(file, source):
                notes.append(f"{file} is left out: it is a link to a file outside of the folder; copy that there")
                continue
            target = destination / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    return notes


def stands_inside(file: Path, folder: Path) -> bool:
    """Whether `file`, with links resolved, is in `folder`, or in the Hub cache's store that its snapshots link to."""
    real, inside = file.resolve(), folder.resolve()
    if real.is_relative_to(inside):
        return True
    # models--org--name/snapshots/<revision>/..., whose files are links into models--org--name/blobs.
    snapshots = next((parent for parent in (inside, *inside.parents) if parent.name == "snapshots"), None)
    return snapshots is not None and real.is_relative_to(snapshots.parent / "blobs")


def refuse_foreign_config(file: Path, source: Path) -> None:
    """`CheckpointError` for a config.json of `source` that links outside of it, since its content would be copied."""
    folder = source if source.is_dir() else source.parent
    if file.parent in (folder, *steps_in(folder).values()) and file.is_symlink() and not stands_inside(file, folder):
        raise CheckpointError(
            "is a link to a file outside of the folder; copy that there, or give it by its own name (`--config`)",
            file=file,
        )


def set_config_dtype(config: Path, dtype: str) -> None:
    """Sets the dtype in `config.json` to that of the written weights, under the key that it already uses."""
    content = json.loads(config.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in content else "dtype"
    config.write_text(json.dumps({**content, key: dtype}, indent=2) + "\n", encoding="utf-8")
