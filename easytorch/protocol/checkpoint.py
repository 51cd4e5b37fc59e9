"""Which file a name or folder stands for, and that it is whole, before transformers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.formats.sharding import read_index, read_json
from easytorch.bridge.formats.torch_bin import PickleFile

FLAX_FILES = ("flax_model.msgpack.index.json", "flax_model.msgpack")
# In the order transformers looks for them.
TORCH_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_CONFIG_LIMIT = 16 << 20
_AGAIN = "download or save it again"
_HUB_ARGUMENTS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")


def flax_file(name_or_path: Any, from_flax: bool, kwargs: dict[str, Any]) -> Path | None:
    """The Flax checkpoint to load, or None where torch weights are: asked for, or all that a folder holds.

    A name on the Hub is only looked up there with `from_flax=True`.
    """
    if name_or_path is None:
        return None
    folder = Path(name_or_path) / (kwargs.get("subfolder") or "")
    if folder.is_dir():
        found = next((folder / name for name in FLAX_FILES if (folder / name).is_file()), None)
        if from_flax and found is None:
            raise CheckpointError(f"from_flax=True needs {' or '.join(reversed(FLAX_FILES))} there", file=folder)
        return found if from_flax or not has_torch_weights(folder, kwargs) else None
    return _from_hub(str(name_or_path), kwargs) if from_flax else None


def has_torch_weights(folder: Path, kwargs: dict[str, Any]) -> bool:
    variant = kwargs.get("variant")
    names = [*TORCH_FILES, "adapter_config.json"]
    if variant:
        names += [f"model.{variant}.safetensors", f"pytorch_model.{variant}.bin"]
    return kwargs.get("gguf_file") is not None or any((folder / name).is_file() for name in names)


def _from_hub(name: str, kwargs: dict[str, Any]) -> Path:
    hub = {key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs}
    for file in FLAX_FILES:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **hub)
        if found is not None:
            if file.endswith(".index.json"):
                get_checkpoint_shard_files(name, found, **hub)
            return Path(found)
    raise CheckpointError(f"from_flax=True needs {' or '.join(reversed(FLAX_FILES))} in the repository", file=name)


def check_torch_files(name_or_path: Any, kwargs: dict[str, Any]) -> str | None:
    """Where the weights of a local checkpoint are, its one file or its folder, for error messages; a Hub name as it is.

    `CheckpointError` when a file is missing, truncated or corrupt, or a pickle of anything but tensors. Of safetensors
    only headers and sizes are read here, and pickles are mapped where torch wrote a zip archive.
    """
    if kwargs.get("weights_only") is False:
        raise ValueError(
            "weights_only=False would run whatever code a .bin file holds and is not supported; save it as safetensors"
        )
    if name_or_path is None:
        return None
    folder = Path(name_or_path) / (kwargs.get("subfolder") or "")
    if not folder.is_dir():
        return str(name_or_path)
    for name in TORCH_FILES:
        if (folder / name).is_file():
            files = _shards(folder / name) if name.endswith(".json") else [folder / name]
            for file in files:
                _check_whole(file)
            return str(files[0] if len(files) == 1 else folder)
    return str(folder)


def check_config(folder: Path) -> None:
    """`CheckpointError` when the config.json of a local checkpoint is absent, broken, or of no known architecture."""
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError("there is no config.json; copy the model's there, or pass config=", file=folder)
    content = read_json(file, limit=_CONFIG_LIMIT)
    model_type = content.get("model_type")
    if "auto_map" in content or model_type in CONFIG_MAPPING:
        return
    if not isinstance(model_type, str):
        raise CheckpointError("has no `model_type`; set it to the architecture's name, as in 'bert'", file=file)
    raise CheckpointError(
        f"neither EasyTorch nor transformers {transformers.__version__} knows the architecture {model_type!r}"
        f"{nearest(model_type, CONFIG_MAPPING)}; correct `model_type`, or install a transformers that knows it",
        file=file,
    )


def _shards(index: Path) -> list[Path]:
    files = [index.parent / name for name in dict.fromkeys(read_index(index).values())]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"the shard {file.name!r} is missing; download or copy it again", file=index)
    return files


def _check_whole(file: Path) -> None:
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt"):
                return
        except SafetensorError as error:
            raise CheckpointError(f"is truncated or corrupt ({error}); {_AGAIN}", file=file) from error
    PickleFile(file).close()
