"""Compiled programs on disk: a file is named by a hash of the module's text, the devices and the versions.

$EASYTORCH_XLA_CACHE is the folder (empty: none), by default ~/.cache/easytorch/xla.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from easytorch.backends.xla import pjrt

CACHE_ENV_VAR = "EASYTORCH_XLA_CACHE"
# The least recently used files are deleted above this size.
LIMIT_BYTES = 2**30
_SUFFIX = ".pjrt"
_DIGEST_BYTES = 32


def folder() -> Path | None:
    """The cache folder, None where caching is off."""
    chosen = os.environ.get(CACHE_ENV_VAR)
    if chosen is None:
        return Path.home() / ".cache" / "easytorch" / "xla"
    return Path(chosen).expanduser() if chosen else None


def compile_module(text: str, devices: Sequence[Any], folding: bool = True, partitioned: bool = False) -> Any:
    """The loaded program of the module, from the cache if it is there; else compiled and cached."""
    home = folder()
    if home is None:
        return pjrt.compile_module(text, devices, folding, partitioned)
    path = home / f"{_key(text, devices, folding)}{_SUFFIX}"
    found = _load(path, devices, partitioned)
    if found is not None:
        return found
    program = pjrt.compile_module(text, devices, folding, partitioned)
    _store(path, pjrt.serialize(program, devices))
    return program


def _key(text: str, devices: Sequence[Any], folding: bool = True) -> str:
    parts = (
        text,
        pjrt.VERSION,
        pjrt.platform_version(devices[0]),
        ",".join(str(device.id) for device in devices),
        pjrt.options_key(folding),
        os.environ.get("XLA_FLAGS", ""),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _load(path: Path, devices: Sequence[Any], partitioned: bool) -> Any | None:
    try:
        data = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    digest, program = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    # PJRT aborts the process on some damaged programs: it is given only files whose checksum fits.
    if hashlib.sha256(program).digest() != digest:
        return None
    try:
        return pjrt.deserialize(program, devices, partitioned)
    except pjrt.RuntimeErrors:
        return None


def _store(path: Path, program: bytes) -> None:
    """Written to a temporary file and renamed, so that no process reads a part. A folder that is not writable is
    skipped."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(program).digest() + program)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
        _trim(path.parent)


def _trim(home: Path) -> None:
    files = []
    for path in home.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= LIMIT_BYTES:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
