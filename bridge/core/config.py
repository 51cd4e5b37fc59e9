"""A checkpoint's config.json."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easytorch.bridge.core.json_files import read_json
from easytorch.bridge.errors import CheckpointError

_CONFIG_LIMIT = 16 << 20


@dataclass(frozen=True)
class Config:
    """The `content` of a config.json, or of what was given or inferred in its place. Errors name `file`."""

    file: Path
    content: dict[str, Any]

    @property
    def model_type(self) -> str:
        """The family's name; `CheckpointError` when the config has none."""
        found = self.content.get("model_type")
        if not isinstance(found, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", found):
            raise CheckpointError(
                f"`model_type` is {found!r}; set it to the family's name, as in 'bert'", file=self.file
            )
        return found

    @property
    def architecture(self) -> str | None:
        """The model class that was saved, by its torch name, or None when the config does not say."""
        listed = self.content.get("architectures")
        if listed is None:
            return None
        if not isinstance(listed, list) or not listed or not isinstance(listed[0], str):
            raise CheckpointError(f"`architectures` is {listed!r}; it is a list with a class name", file=self.file)
        return listed[0].removeprefix("Flax")


def settings_of(config: Config) -> Any:
    """transformers' config object, with every default filled in."""
    import transformers

    return transformers.CONFIG_MAPPING[config.model_type].from_dict(config.content)


def given_config(path: Path) -> Config:
    """The config a user gives: a file of any name, or the folder of a config.json."""
    from easytorch.bridge.core.weight_files import is_weights

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        what = "there is no config.json in this folder" if path.is_dir() else "there is no such config"
        raise CheckpointError(f"{what}; give the path of the model's config.json, or of its folder", file=path)
    if is_weights(file.name):
        raise CheckpointError("holds weights and is no config.json; give the path of that, or of its folder", file=path)
    return Config(file, read_json(file, limit=_CONFIG_LIMIT))


def read_config(path: Path) -> Config:
    """The config of a checkpoint folder, or of the folder of a weight file."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        raise CheckpointError("there is no config.json beside the weights; copy the model's there", file=file.parent)
    return Config(file, read_json(file, limit=_CONFIG_LIMIT))


def find_config(path: Path) -> Config | None:
    """`read_config`, or None where there is no config.json."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    return read_config(path) if file.is_file() else None
