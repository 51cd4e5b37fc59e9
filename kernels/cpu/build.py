"""Compiles the C++ sources of all operations into one shared library, kept in a cache.

    python -m easytorch.kernels.cpu.build          before the first use, as when an image is made

The folder is $XDG_CACHE_HOME/easytorch/cpu, by default ~/.cache/easytorch/cpu; a file is named after the sources,
torch, the compiler and the machine's architecture. Every instruction set is compiled in and one chosen at run time, so
that machines of different CPUs may share a home. `pip install` builds nothing: it works in an environment without
torch, and its wheel would have to name the platform.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).resolve().parents[1]
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fno-math-errno", "-w")
# What the *_simd.cpp sources are compiled for, by the name their tables take; see levels.h.
_AVX512 = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
LEVELS = {
    "generic": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
}
# Older libraries than these go when one is built.
KEPT = 8


class BuildError(RuntimeError):
    """The library could not be built; the message says why in one line."""


def folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "easytorch" / "cpu"


def compiler() -> str | None:
    """The C++ compiler: $CXX, else the first that is installed."""
    chosen = os.environ.get("CXX")
    return next(filter(None, (shutil.which(name) for name in ((chosen,) if chosen else COMPILERS))), None)


def refusal() -> str | None:
    """None where the library can be built here, else the reason."""
    if sys.platform == "win32":
        return "the C++ kernels are built on Linux and macOS only"
    if compiler() is None:
        chosen = os.environ.get("CXX")
        return f"$CXX names {chosen!r}, which is not found" if chosen else "no C++ compiler is installed"
    return None


def library_path() -> Path:
    """Where the library of these sources lies once it is built. There must be a compiler."""
    return folder() / f"{_key(str(compiler()), _flags(), torch.__version__)}.so"


def build() -> Path:
    """The path of the library, compiled now unless it is there; `BuildError` where that fails.

    One process compiles, others wait for it. The file is complete or absent: it is written under another name.
    """
    reason = refusal()
    if reason is not None:
        raise BuildError(reason)
    path = library_path()
    if path.exists():
        return path
    failed = path.with_suffix(".failed")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if failed.exists():
                raise BuildError(
                    f"the C++ compiler failed before: its messages are in {failed}, remove it to try again"
                )
            if not path.exists():
                _compile_into(path, failed)
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME") from error
    return path


def _compile_into(path: Path, failed: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="easytorch-cpu-") as work:
        try:
            made = _compile(Path(work))
        except subprocess.CalledProcessError as error:
            _write(failed, f"{' '.join(error.cmd)}\n{error.stderr}".encode())
            raise BuildError(f"the C++ compiler failed; its messages are in {failed}") from error
        _write(path, made.read_bytes())
    _trim(path)


def _compile(work: Path) -> Path:
    """The library, in the folder `work`."""
    tool, flags = str(compiler()), _flags()
    torch_home = Path(torch.__file__).parent
    jobs: list[list[str]] = []
    for source in sources():
        base = [tool, *flags, "-c", str(source)]
        name = f"{source.parent.name}_{source.stem}"
        if not source.stem.endswith("_simd"):
            jobs.append([*base, "-isystem", str(torch_home / "include"), "-o", str(work / f"{name}.o")])
            continue
        for level, instructions in levels(tool).items():
            symbol = f"-DEASYTORCH_NAME(name)=easytorch_##name##_{level}"
            jobs.append([*base, *instructions, symbol, "-o", str(work / f"{name}_{level}.o")])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
        list(pool.map(_run, jobs))
    made = work / "library.so"
    link = [tool, *flags, "-shared", *sorted(str(path) for path in work.glob("*.o")), "-o", str(made)]
    _run([*link, f"-L{torch_home / 'lib'}", "-ltorch_cpu"])
    return made


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=SOURCES)


def sources() -> list[Path]:
    return sorted(SOURCES.glob("*/cpu*.cpp"))


def levels(tool: str) -> dict[str, tuple[str, ...]]:
    """The instruction sets of this machine's architecture that the compiler knows."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {"generic": ()}
    return {level: flags for level, flags in LEVELS.items() if _knows(tool, flags)}


@functools.cache
def _knows(tool: str, flags: tuple[str, ...]) -> bool:
    command = [tool, *flags, "-x", "c++", "-E", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def _flags() -> tuple[str, ...]:
    """EASYTORCH_CPU_FLAGS adds to them: a sanitizer's, for one (scripts/test_sanitizers.sh)."""
    return (*FLAGS, *os.environ.get("EASYTORCH_CPU_FLAGS", "").split())


@functools.cache
def _key(tool: str, flags: tuple[str, ...], torch_version: str) -> str:
    found = hashlib.sha256()
    for path in [*sources(), *sorted(SOURCES.glob("*/cpu*.h")), *sorted((SOURCES / "cpu").glob("*.h"))]:
        found.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes() + b"\0")
    stamp = Path(tool).resolve().stat()
    found.update(repr((tool, stamp.st_size, stamp.st_mtime_ns, flags, torch_version, platform.machine())).encode())
    return found.hexdigest()[:24]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock goes with the process that holds it, however that ends."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def _trim(newest: Path) -> None:
    """Keep the libraries built last. One that is in use stays mapped in its process."""
    made = sorted(newest.parent.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in made[KEPT:]:
        for old in (path, path.with_suffix(".lock")):
            old.unlink(missing_ok=True)


if __name__ == "__main__":
    began = time.perf_counter()
    print(f"{build()} ({time.perf_counter() - began:.1f} s)")
