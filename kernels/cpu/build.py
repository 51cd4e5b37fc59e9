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
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).resolve().parents[1]
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fno-math-errno", "-w")
# The instruction sets that the *_simd.cpp sources are compiled for, by the suffix of their tables, in the order of
# levels.h.
_AVX512 = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
LEVELS = {
    "generic": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512_bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
}
# What a source names if it differs at a level from the one below it; others are not compiled for it.
_NAMED = {"avx512_vnni": "__AVX512VNNI__"}
_OFF = ("0", "false", "no", "off")
# How many libraries are kept; building one deletes the oldest.
KEPT = 8
# Seconds a failure of the compiler is remembered, so that not every process tries: memory or disk may have been short.
REMEMBERED = 3600
# Seconds after which a compiler is taken to hang.
LONGEST = 900


class BuildError(RuntimeError):
    """The library could not be built; the message says why in one line."""


def folder() -> Path | None:
    """The folder of built libraries; None without a home directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # its specification says to ignore a relative path
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return None
    return cache / "easytorch" / "cpu"


def compiler() -> list[str] | None:
    """The command of the C++ compiler: $CXX with its arguments, else the first that is installed."""
    chosen = os.environ.get("CXX", "").strip()
    for name, *arguments in [[chosen], chosen.split()] if chosen else [[name] for name in COMPILERS]:
        if (tool := shutil.which(name)) is not None:
            return [tool, *arguments]
    return None


def switched_off() -> str | None:
    """The reason why nothing in C++ is built or loaded, where the user has said so, else None."""
    value = os.environ.get("EASYTORCH_CPU_KERNELS", "")
    return f"EASYTORCH_CPU_KERNELS={value}" if value.strip().lower() in _OFF else None


def refusal() -> str | None:
    """None where the library is there or can be built here, else the reason."""
    if sys.platform == "win32":
        return "the C++ kernels are built on Linux and macOS only"
    if folder() is None:
        return "no home folder is known: set HOME or XDG_CACHE_HOME"
    if compiler() is None and not built(library_path()):
        chosen = os.environ.get("CXX")
        return f"$CXX names {chosen!r}, which is not found" if chosen else "no C++ compiler is installed"
    return None


def library_path() -> Path:
    """The path of the library for these sources; without a compiler, of the newest that was built from them."""
    kept = folder()
    assert kept is not None, "refusal() says so"
    return library_in(kept, _sources_key(_flags(), torch.__version__))


def library_in(kept: Path, sources_key: str) -> Path:
    """The path of a library in its folder, of the sources of that key."""
    tool = compiler()
    if tool is None:
        made = _newest_first(kept.glob(f"{sources_key}-*.so"))
        return made[0] if made else kept / f"{sources_key}.so"
    return kept / f"{sources_key}-{_compiler_key(*tool)}.so"


def built(path: Path) -> bool:
    """Whether the library exists; False where its folder cannot be read, for which `Path.exists` raises."""
    return os.path.exists(path)


def build() -> Path:
    """The path of the library, which is compiled unless it is there; `BuildError` where that fails.

    One process compiles, others wait. The file is written under a temporary name, so it is complete or absent.
    """
    reason = refusal()
    if reason is not None:
        raise BuildError(reason)
    return build_into(library_path(), _compile)


def build_into(path: Path, compile: Callable[[Path], Path]) -> Path:
    """`path`, where the library is put that `compile` makes in the folder it is given, unless it is there."""
    if built(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _compile_into(path, compile)
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME") from error
    return path


def _compile_into(path: Path, compile: Callable[[Path], Path]) -> None:
    """Compiles into `path`; the caller holds the lock."""
    failed, work = path.with_suffix(".failed"), path.with_suffix(".build")
    if failed.exists() and time.time() - failed.stat().st_mtime < REMEMBERED:
        raise BuildError(f"the C++ compiler failed before: its messages are in {failed}, remove it to try again")
    shutil.rmtree(work, ignore_errors=True)  # left by a killed process
    work.mkdir()
    try:
        made = compile(work)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(made, path)
    except subprocess.CalledProcessError as error:
        failed.write_text(f"{' '.join(error.cmd)}\n{error.stderr}", encoding="utf-8", errors="replace")
        raise BuildError(f"the C++ compiler failed; its messages are in {failed}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    failed.unlink(missing_ok=True)
    _trim(path)


def _compile(work: Path) -> Path:
    """The library, in the folder `work`."""
    tool = compiler()
    assert tool is not None, "refusal() says so"
    jobs = compile_commands(work, tool, platform.machine())
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
        list(pool.map(_run, jobs))
    made = work / "library.so"
    link = [*tool, *_flags(), "-shared", *sorted(str(path) for path in work.glob("*.o")), "-o", str(made)]
    _run([*link, f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu"])
    return made


def compile_commands(work: Path, tool: list[str], machine: str) -> list[list[str]]:
    """One command for each object file of the library on a machine of that architecture; they lie in `work`."""
    jobs: list[list[str]] = []
    for source in sources():
        base = [*tool, *_flags(), "-c", str(source)]
        name = f"{source.parent.name}_{source.stem}"
        if not source.stem.endswith("_simd"):
            headers = Path(torch.__file__).parent / "include"
            jobs.append([*base, "-isystem", str(headers), "-o", str(work / f"{name}.o")])
            continue
        for level, instructions in levels(tool, machine).items():
            if not differs(source, level):
                continue
            symbol = f"-DEASYTORCH_NAME(name)=easytorch_##name##_{level}"
            jobs.append([*base, *instructions, symbol, "-o", str(work / f"{name}_{level}.o")])
    return jobs


def _run(command: list[str]) -> None:
    # a compiler's messages may have any encoding
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, errors="replace", cwd=SOURCES, timeout=LONGEST
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not end within {LONGEST} s") from error
    except OSError as error:
        raise BuildError(f"{command[0]} does not run ({error.strerror})") from error


def sources() -> list[Path]:
    """The C++ files of this folder, and `cpu*.cpp` of the operations'."""
    return sorted([*(SOURCES / "cpu").glob("*.cpp"), *SOURCES.glob("*/cpu*.cpp")])


def differs(source: Path, level: str) -> bool:
    """Whether a *_simd.cpp source has code of its own at a level, and is compiled for it."""
    return _NAMED.get(level, "") in source.read_text(encoding="utf-8")


def levels(tool: list[str], machine: str) -> dict[str, tuple[str, ...]]:
    """The instruction sets of a machine's architecture that the compiler knows."""
    if machine not in ("x86_64", "AMD64"):
        return {"generic": ()}
    return {level: flags for level, flags in LEVELS.items() if _knows(*tool, *flags)}


@functools.cache
def _knows(*command: str) -> bool:
    """Whether the compiler takes these arguments."""
    try:
        _run([*command, "-x", "c++", "-E", os.devnull])
    except subprocess.CalledProcessError:
        return False
    return True


def _flags() -> tuple[str, ...]:
    """The compiler's flags; EASYTORCH_CPU_FLAGS adds more, such as a sanitizer's (scripts/test_sanitizers.sh)."""
    return (*FLAGS, *os.environ.get("EASYTORCH_CPU_FLAGS", "").split())


@functools.cache
def _sources_key(flags: tuple[str, ...], torch_version: str) -> str:
    paths = [*sources(), *sorted(SOURCES.glob("*/cpu*.h")), *sorted((SOURCES / "cpu").glob("*.h"))]
    return key_of(paths, flags, torch_version, platform.machine())


def key_of(paths: Iterable[Path], *facts: Any) -> str:
    """What names a library that is made of these files of `SOURCES`, and depends on these facts too."""
    found = hashlib.sha256()
    for path in paths:
        found.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes() + b"\0")
    found.update(repr(facts).encode())
    return found.hexdigest()[:16]


@functools.cache
def _compiler_key(*tool: str) -> str:
    stamp = Path(tool[0]).resolve().stat()
    return hashlib.sha256(repr((tool, stamp.st_size, stamp.st_mtime_ns)).encode()).hexdigest()[:8]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an flock on `path`, which ends with the process even if that is killed."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # closing would leave it to processes forked meanwhile, which have the file open too
            fcntl.flock(file, fcntl.LOCK_UN)


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """The paths that exist, newest first: another process may be removing old ones."""
    aged = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            aged.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(aged, reverse=True)]


def _trim(newest: Path) -> None:
    """Keep the libraries built last. One that is in use stays mapped in its process."""
    for path in _newest_first(newest.parent.glob("*.so"))[KEPT:]:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    began = time.perf_counter()
    print(f"{build()} ({time.perf_counter() - began:.1f} s)")
    runpy.run_module("easytorch.kernels.repeated.build", run_name="__main__")  # which imports this file
