"""Locations of checkpoints: a local path, a name on the Hub, or a URL of a file system of fsspec (`gs://`, `s3://`).

Hub names go through `huggingface_hub`, its cache and its environment variables, with `@revision` after the name if
wanted. Of a remote folder only the weights that will be read, and the files that are not weights, are fetched.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

from easytorch.bridge.core.weight_files import is_weights
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.safetensors_files.torch_safetensors import HEADER_LIMIT
from easytorch.bridge.formats.sharding import read_index

Location = str | PathLike[str]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[^:]+)*://")
_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[\w./-]+))?")
_HUB_SCHEME = "hf://"
# Names of weight files in repositories: if one of them is cached, so is the rest of the checkpoint.
_WEIGHT_FILES = [
    f"{name}{index}"
    for name in ("model.safetensors", "flax_model.msgpack", "pytorch_model.bin")
    for index in ("", ".index.json")
]


def is_remote(location: Location) -> bool:
    """Whether `location` is a URL."""
    return isinstance(location, str) and _URL.match(location) is not None


@contextmanager
def local_source(
    location: Location, *, prefer: registry.Kind | None = None, headers_only: bool = False
) -> Iterator[Path]:
    """The local folder or file of `location`: itself, in the Hub's cache, or a copy that is deleted with the block.

    A string that is not an existing path and could be a name on the Hub is taken as one. `prefer`: as in
    `registry.find`. headers_only: remote safetensors are fetched without their data.
    """
    _refuse_null(location)
    if not isinstance(location, str) or os.path.lexists(location):
        yield Path(location)
        return
    on_hub = location.startswith(_HUB_SCHEME) or (_HUB_NAME.fullmatch(location) and location.count("/") == 1)
    if not on_hub and not is_remote(location):
        yield Path(location)
        return
    url, name = location, location.removeprefix(_HUB_SCHEME)
    if on_hub:
        local = _cached(name) if headers_only else _from_hub(name, prefer)
        if local is not None:
            yield local
            return
        url = _HUB_SCHEME + name
    with tempfile.TemporaryDirectory(prefix="easytorch-") as folder:
        yield _fetched(url, Path(folder), prefer, headers_only)


@contextmanager
def local_destination(location: Location) -> Iterator[Path]:
    """The folder to write `location` in: itself, or one that is uploaded when the block succeeds.

    The URL must not exist yet. `hf://org/name` makes a repository, in one commit; elsewhere the files that make a
    checkpoint complete (config, index) are uploaded last, and a failed upload is removed.
    """
    _refuse_null(location)
    if not is_remote(location):
        yield Path(location)
        return
    url = str(location)
    with tempfile.TemporaryDirectory(prefix="easytorch-") as folder:
        local = Path(folder, PurePosixPath(url).name)
        if url.startswith(_HUB_SCHEME):
            yield local
            _to_hub(local, url.removeprefix(_HUB_SCHEME))
            return
        system, root = _file_system(url)
        if system.exists(root):
            raise CheckpointError("exists already; choose another destination or remove it first", file=url)
        yield local
        _upload(local, system, root, url)


def _refuse_null(location: Location) -> None:
    if "\0" in os.fspath(location):
        raise CheckpointError("holds a null character, which no path does; give another name", file=location)


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except ValueError as error:
        raise CheckpointError(f"is no URL that can be opened ({error})", file=url) from error
    return file_system, path


def _fetched(url: str, folder: Path, prefer: registry.Kind | None, headers_only: bool) -> Path:
    system, root = _file_system(url)

    def get(remote: str, local: Path) -> None:
        if headers_only and remote.endswith(".safetensors"):
            _get_header(system, remote, local)
        else:
            system.get_file(remote, str(local))

    try:
        if system.isfile(root):
            local = folder / PurePosixPath(root).name
            get(root, local)
            return local
        prefix = root.rstrip("/") + "/"
        names = [path.removeprefix(prefix) for path in system.find(root)]
        if not names:
            raise CheckpointError("does not exist or is empty", file=url)

        def fetch(name: str) -> Path:
            local = _inside(folder, name, url)
            if not local.is_file():
                local.parent.mkdir(parents=True, exist_ok=True)
                get(prefix + name, local)
            return local

        for name in wanted(names, prefer, url, fetch):
            fetch(name)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=url) from error
    return folder


def _get_header(system: Any, remote: str, local: Path) -> None:
    """Writes a sparse safetensors file: its header, and a hole of the data's size."""
    with system.open(remote, "rb") as stream, local.open("wb") as copy:
        length = stream.read(8)
        copy.write(length + stream.read(min(int.from_bytes(length, "little"), HEADER_LIMIT)))
        copy.truncate(system.size(remote))


def _inside(folder: Path, name: str, url: str) -> Path:
    if not name or name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise CheckpointError(f"lists the file {name!r}, which is not inside it", file=url)
    return folder / name


def wanted(
    names: Iterable[str], prefer: registry.Kind | None, location: str, fetch: Callable[[str], Path]
) -> list[str]:
    """Which of the files `names` make up the checkpoint that will be read, with the files beside it.

    fetch: gets one of them and returns its path here; an index says which shards are meant.
    """
    names = sorted(names)
    with tempfile.TemporaryDirectory(prefix="easytorch-") as folder:
        # Formats are detected by file names alone, so empty files of the same names are enough.
        for name in names:
            stand_in = _inside(Path(folder), name, location)
            stand_in.parent.mkdir(parents=True, exist_ok=True)
            stand_in.touch()
        _, found = registry.find(Path(folder), prefer=prefer)
        chosen = found.relative_to(folder).as_posix()
        is_folder = found.is_dir()
    beside = [name for name in names if not is_weights(name) and "/." not in f"/{name}"]
    if is_folder:
        return [name for name in names if chosen == "." or name.startswith(f"{chosen}/") or name in beside]
    if not chosen.endswith(".index.json"):
        return sorted({chosen, *beside})
    parent = PurePosixPath(chosen).parent
    shards = {(parent / file).as_posix() for file in read_index(fetch(chosen)).values()}
    return sorted({chosen, *beside, *(shard for shard in shards if shard in names)})


def _cached(name: str) -> Path | None:
    """The cached snapshot of a repository, if it has weights; offline, a missing one is an error."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        return _from_hub(name, None)
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise CheckpointError("is no name of a repository; write org/name, or org/name@revision", file=name)
    for file in _WEIGHT_FILES:
        found = try_to_load_from_cache(match["repo"], file, revision=match["revision"])
        if isinstance(found, str):
            return Path(found).parent
    return None


def _from_hub(name: str, prefer: registry.Kind | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise CheckpointError("is no name of a repository; write org/name, or org/name@revision", file=name)
    repo, revision = match["repo"], match["revision"]
    try:
        if is_offline_mode():
            return Path(snapshot_download(repo, revision=revision, local_files_only=True))
        names = HfApi().list_repo_files(repo, revision=revision)
        files = wanted(names, prefer, name, lambda file: Path(hf_hub_download(repo, file, revision=revision)))
        return Path(snapshot_download(repo, revision=revision, allow_patterns=files))
    except LocalEntryNotFoundError as error:
        # Only the wanted files were fetched; newer versions of huggingface_hub report the others as missing.
        if (snapshot := getattr(error, "snapshot_path", None)) is not None:
            return Path(snapshot)
        message = "is no folder here, and neither in the cache of the Hub; connect, or give a folder"
        raise CheckpointError(message, file=name) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"is no folder here, and the Hub says: {reason}", file=name) from error


def _to_hub(folder: Path, name: str) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi()
    try:
        api.create_repo(name)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Converted by EasyTorch")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"cannot be written: {reason}", file=_HUB_SCHEME + name) from error


def _upload(local: Path, system: Any, root: str, url: str) -> None:
    files = [local] if local.is_file() else sorted(file for file in local.rglob("*") if file.is_file())
    # Weights first (the sort is stable), then the files by which readers recognise a checkpoint.
    files.sort(key=lambda file: not is_weights(file.name) or file.name.endswith(".index.json"))
    try:
        for file in files:
            remote = root if file == local else f"{root.rstrip('/')}/{file.relative_to(local).as_posix()}"
            system.makedirs(remote.rpartition("/")[0], exist_ok=True)
            system.put_file(str(file), remote)
    except BaseException as error:
        if system.exists(root):
            system.rm(root, recursive=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot be written: {error.strerror or error}", file=url) from error
        raise
