"""Which file a name or folder stands for, and whether it is complete, before transformers reads it."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from huggingface_hub import HfApi, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, PreTrainedConfig

from easytorch.bridge.checkpoint import open_checkpoint
from easytorch.bridge.core.json_files import read_json
from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.formats.base import Format
from easytorch.bridge.formats.registry import Found, Kind, classify, find, kind_of
from easytorch.bridge.formats.sharding import read_index
from easytorch.bridge.formats.torch_files.torch_bin import PickleFile
from easytorch.bridge.jobs.locations import wanted

# In the order transformers looks for them.
TORCH_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Those of `from_pretrained` that say where on the Hub and in its cache a file is.
HUB_ARGUMENTS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
_CONFIG_LIMIT = 16 << 20
_AGAIN = "download or save it again"


class FlaxFile(NamedTuple):
    """A checkpoint that the bridge reads: its file or folder, and as what it was classified."""

    path: Path
    found: Found


def flax_file(name_or_path: Any, from_flax: bool, kwargs: dict[str, Any]) -> FlaxFile | None:
    """The checkpoint to load through the bridge, or None where transformers reads the weights itself.

    With `from_flax` that is a Flax or other JAX tree; otherwise whatever the bridge reads (Flax, Orbax, npz, a
    torch.dcp folder), if torch's own files hold no weights. A name on the Hub is looked up there, in its cache first.
    """
    if name_or_path is None:
        return None
    folder = Path(name_or_path) / (kwargs.get("subfolder") or "")
    if folder.is_dir():
        return _in_folder(folder, from_flax, kwargs)
    snapshot = _from_hub(str(name_or_path), from_flax, kwargs)
    return None if snapshot is None else _in_folder(snapshot / (kwargs.get("subfolder") or ""), from_flax, kwargs)


def _in_folder(folder: Path, from_flax: bool, kwargs: dict[str, Any]) -> FlaxFile | None:
    if from_flax:
        if "tree" not in (found := classify(folder)):
            raise CheckpointError(
                "from_flax=True needs flax_model.msgpack or another tree of arrays there", file=folder
            )
        return _as_found("tree", found["tree"])
    if not has_torch_weights(folder, kwargs):
        found = classify(folder)
        if not found:
            return None
        format_, file = find(folder, prefer="tree", found=found)
        return _as_found(kind_of(format_), (format_, file))
    # HF's Flax classes wrote safetensors under torch's file name.
    named = kwargs.get("gguf_file") is None and any((folder / name).is_file() for name in TORCH_FILES)
    if not named:
        return None
    format_, file = find(folder, prefer="torch")
    return _as_found("tree", (format_, file)) if kind_of(format_) == "tree" else None


def _as_found(kind: Kind, entry: tuple[Format, Path]) -> FlaxFile:
    return FlaxFile(entry[1], {kind: entry})


def has_torch_weights(folder: Path, kwargs: dict[str, Any]) -> bool:
    """Whether a folder holds weights under a file name that transformers loads."""
    variant = kwargs.get("variant")
    names = [*TORCH_FILES, "adapter_config.json"]
    if variant:
        names += [f"model.{variant}.safetensors", f"pytorch_model.{variant}.bin"]
    return kwargs.get("gguf_file") is not None or any((folder / name).is_file() for name in names)


def _from_hub(name: str, from_flax: bool, kwargs: dict[str, Any]) -> Path | None:
    """The snapshot of a repository with the files the bridge will read; None for one that transformers reads itself."""
    hub = {key: kwargs[key] for key in ("cache_dir", "token", "revision") if kwargs.get(key) is not None}
    cached = {key: value for key, value in hub.items() if key != "token"}
    inside = f"{kwargs['subfolder']}/" if kwargs.get("subfolder") else ""
    there = (isinstance(try_to_load_from_cache(name, inside + file, **cached), str) for file in TORCH_FILES)
    try:
        if not from_flax and (kwargs.get("gguf_file") is not None or any(there)):
            return None
        if kwargs.get("local_files_only") or is_offline_mode():
            return Path(snapshot_download(name, local_files_only=True, **hub))
        listed = HfApi(token=hub.get("token")).list_repo_files(name, revision=hub.get("revision"))
        if not from_flax and any(_is_torch(file.removeprefix(inside)) for file in listed):
            return None
        files = wanted(listed, "tree", name, lambda file: Path(hf_hub_download(name, file, **hub)))
        return Path(snapshot_download(name, allow_patterns=files, **hub))
    except (HfHubHTTPError, HFValidationError, OSError, CheckpointError) as error:
        if not from_flax:
            return None  # transformers says what is wrong with a name
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"from_flax=True needs flax_model.msgpack there: {reason}", file=name) from error


def hub_snapshot(name: str, kwargs: Mapping[str, Any], wanted_settings: Callable[[Any], bool]) -> Path | None:
    """The folder in the Hub's cache with config and weights of a repository, downloaded where they are not there.

    None where the `quantization_config` of its config, or of a config in `kwargs`, is not one of `wanted_settings`, and
    for a name that is none: transformers says what is wrong with it.
    """
    hub: dict[str, Any] = {
        key: kwargs[key] for key in ("cache_dir", "token", "revision") if kwargs.get(key) is not None
    }
    inside = f"{kwargs['subfolder']}/" if kwargs.get("subfolder") else ""
    local, config = bool(kwargs.get("local_files_only")) or is_offline_mode(), kwargs.get("config")
    try:
        if isinstance(config, PreTrainedConfig):
            given = getattr(config, "quantization_config", None)
        else:
            file = Path(hf_hub_download(name, f"{inside}config.json", local_files_only=local, **hub))
            given = read_json(file, limit=_CONFIG_LIMIT).get("quantization_config")
        settings = given if isinstance(given, Mapping) or given is None else given.to_dict()
        if settings is None or not wanted_settings(settings):
            return None
        if local:
            return Path(snapshot_download(name, local_files_only=True, **hub)) / inside
        listed = HfApi(token=hub.get("token")).list_repo_files(name, revision=hub.get("revision"))
        here = [file for file in listed if file.startswith(inside) and "/" not in file.removeprefix(inside)]
        weights = [file for file in here if file.endswith(".safetensors")] or [
            file for file in here if file.endswith(".bin")
        ]
        files = weights + [file for file in here if file.endswith(".json")]
        return Path(snapshot_download(name, allow_patterns=[glob.escape(file) for file in files], **hub)) / inside
    except (HfHubHTTPError, HFValidationError, OSError):
        return None


def _is_torch(file: str) -> bool:
    return file in TORCH_FILES or file == "adapter_config.json" or file.endswith(".gguf")


def check_torch_files(name_or_path: Any, kwargs: dict[str, Any]) -> str | None:
    """The path of a local checkpoint's weights, its one file or its folder, for error messages; a Hub name unchanged.

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
    files = weight_files(folder, kwargs)
    for file in files:
        check_weight_file(file)
    return str(files[0] if len(files) == 1 else folder)


def weight_files(folder: Path, kwargs: Mapping[str, Any]) -> list[Path]:
    """The files of torch weights that transformers loads from a folder. kwargs: those of `from_pretrained`, of which
    `variant` and `use_safetensors` choose among them."""
    variant, safetensors = kwargs.get("variant"), kwargs.get("use_safetensors")
    for usual in TORCH_FILES:
        if safetensors is not None and bool(safetensors) != ("safetensors" in usual):
            continue
        stem, _, ending = usual.rpartition(".")
        name = f"{stem}.{variant}.{ending}" if variant else usual
        if (folder / name).is_file():
            return _shards(folder / name) if name.endswith(".json") else [folder / name]
    return []


def torch_folder(name_or_path: Any, kwargs: dict[str, Any]) -> Path:
    """The folder with the torch weights that have been loaded from a folder or a name on the Hub."""
    inside = kwargs.get("subfolder") or ""
    if Path(name_or_path).is_dir():
        return Path(name_or_path) / inside
    where = {key: kwargs[key] for key in ("cache_dir", "revision") if kwargs.get(key) is not None}
    cached = (try_to_load_from_cache(str(name_or_path), str(Path(inside, file)), **where) for file in TORCH_FILES)
    try:
        return next((Path(file).parent for file in cached if isinstance(file, str)), Path(name_or_path))
    except HFValidationError:  # a folder that is not there, and no name on the Hub: loading says so
        return Path(name_or_path)


def inferred_config(folder: Path) -> PreTrainedConfig | None:
    """The config of a checkpoint without one, inferred from names and shapes (Gemma, MaxText, T5X) where possible."""
    if (folder / "config.json").is_file() or has_torch_weights(folder, {}) or not (found := classify(folder)):
        return None
    with open_checkpoint(folder, prefer="tree", found=found) as checkpoint:
        config = checkpoint.config
    return None if config is None else CONFIG_MAPPING[config.model_type].from_dict(config.content)


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


def check_weight_file(file: Path) -> None:
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt"):
                return
        except SafetensorError as error:
            raise CheckpointError(f"is truncated or corrupt ({error}); {_AGAIN}", file=file) from error
    PickleFile(file).close()
