"""The library of C++ kernels: built once whoever asks, complete or absent, and never by an import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from easytorch.kernels.cpu import build, library

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the C++ kernels are built on Linux and macOS only")

ROOT = Path(__file__).resolve().parents[3]

# Stands in for a compiler: writes what it is asked for, and a line into $LOG for each library it links.
COMPILER = """#!/bin/sh
while [ $# -gt 0 ]; do
    if [ "$1" = -shared ]; then linking=yes; fi
    if [ "$1" = -o ]; then output=$2; fi
    shift
done
if [ -n "$linking" ]; then
    echo linked >> "$LOG"
    eval "$WHILE_LINKING"
fi
if [ -n "$output" ]; then echo made > "$output"; fi
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    ours = {"CXX": str(compiler), "LOG": str(tmp_path / "log"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return {**os.environ, **ours, "WHILE_LINKING": ":"}


def start(environment: dict[str, str], code: str = "print(build.build())") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"from easytorch.kernels.cpu import build, library; {code}"]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def linked(environment: dict[str, str]) -> int:
    log = Path(environment["LOG"])
    return len(log.read_text().splitlines()) if log.exists() else 0


def cached(environment: dict[str, str]) -> list[str]:
    folder = Path(environment["XDG_CACHE_HOME"]) / "easytorch" / "cpu"
    return sorted(path.suffix for path in folder.iterdir()) if folder.exists() else []


def test_two_processes_build_one_library(environment: dict[str, str]) -> None:
    # the one that links waits until the other has had all the time it needs to come to the lock, if it is there
    environment["WHILE_LINKING"] = "sleep 1"
    both = [start(environment), start(environment)]
    outputs = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert Path(outputs[0][0].strip()).read_text() == "made\n"
    assert linked(environment) == 1


def test_a_killed_build_leaves_nothing_that_loads_and_no_lock(environment: dict[str, str]) -> None:
    killed = start({**environment, "WHILE_LINKING": "kill -9 $PPID"})
    killed.communicate(timeout=600)
    assert killed.returncode == -9
    assert ".so" not in cached(environment)
    again = start(environment)
    output, error = again.communicate(timeout=600)
    assert again.returncode == 0, error
    assert Path(output.strip()).read_text() == "made\n"
    assert linked(environment) == 2
    assert cached(environment) == [".lock", ".so"]  # the objects of the first are gone too


def test_nothing_is_built_by_an_import_or_by_asking(environment: dict[str, str]) -> None:
    process = start(environment, "import easytorch, easytorch.operations, easytorch.layers; print(library.described())")
    output, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    assert output.startswith("not built yet: ")
    assert linked(environment) == 0
    assert cached(environment) == []


def test_a_compiler_that_fails_is_asked_once(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(environment["CXX"]).write_text("#!/bin/sh\necho asked >> $LOG; echo 'no such header' >&2; exit 1\n")
    for name in ("CXX", "LOG", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, environment[name])
    with pytest.raises(build.BuildError, match="compiler failed; its messages are in "):
        build.build()
    asked = linked(environment)
    (messages,) = (tmp_path / "cache" / "easytorch" / "cpu").glob("*.failed")
    assert "no such header" in messages.read_text()
    with pytest.raises(build.BuildError, match="failed before"):
        build.build()
    assert linked(environment) == asked
    messages.unlink()
    Path(environment["CXX"]).write_text(COMPILER)
    build._compiler_key.cache_clear()
    assert build.build().read_text() == "made\n"


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_asked", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))  # what was built before needs no compiler
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    assert library.described() == "ATen runs: $CXX names 'a-compiler-that-is-not-there', which is not found"
    with pytest.raises(build.BuildError, match="which is not found"):
        build.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert library.described() == "ATen runs: no C++ compiler is installed"
    monkeypatch.setenv("EASYTORCH_CPU_KERNELS", "0")
    assert library.described() == "ATen runs: EASYTORCH_CPU_KERNELS=0"
    monkeypatch.delenv("EASYTORCH_CPU_KERNELS")
    # one that another stage of an image built
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = tmp_path / "easytorch" / "cpu" / f"{build.library_path().stem}-0.so"
    made.parent.mkdir(parents=True)
    made.write_text("made")
    assert library.described() == f"built: {made}"
    assert build.build() == made


def test_a_home_that_is_not_known_or_cannot_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(library, "_asked", False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "home", unknown)
        for cache in (None, "", "relative"):
            patch.delenv("XDG_CACHE_HOME", raising=False) if cache is None else patch.setenv("XDG_CACHE_HOME", cache)
            assert library.described() == "ATen runs: no home folder is known: set HOME or XDG_CACHE_HOME"
            assert library._try_to_load() == "no home folder is known: set HOME or XDG_CACHE_HOME"
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + "a" * 5000)
    if build.compiler() is not None:
        assert library.described().startswith("not built yet: ")
        assert "set XDG_CACHE_HOME" in str(library._try_to_load())


@pytest.fixture
def fake(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in as this process's compiler."""
    for name in ("CXX", "LOG", "XDG_CACHE_HOME", "WHILE_LINKING"):
        monkeypatch.setenv(name, environment[name])
    return Path(environment["CXX"])


def test_a_compiler_with_arguments(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{fake} -march=native")
    assert build.compiler() == [str(fake), "-march=native"]
    spaced = fake.rename(fake.with_name("a compiler"))
    monkeypatch.setenv("CXX", str(spaced))
    previous = os.umask(0o022)
    try:
        made = build.build()
    finally:
        os.umask(previous)
    assert made.read_text() == "made\n"
    assert made.stat().st_mode & 0o044 == 0o044  # a cache may be others' too


def test_a_library_is_named_after_all_that_it_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every source, and every header that one includes."""
    copies = tmp_path / "kernels"
    for path in [*build.SOURCES.rglob("*.cpp"), *build.SOURCES.rglob("*.h")]:
        copy = copies / path.relative_to(build.SOURCES)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCES", copies)
    key = build._sources_key.__wrapped__
    before, used, waiting = key((), "2"), set(), build.sources()
    while waiting:
        path = waiting.pop()
        if path not in used:
            used.add(path)
            included = re.findall(r'#include "([^"]+)"', path.read_text())
            waiting += [(path.parent / name).resolve() for name in included]
    assert len(used) > 2 * len(build.LEVELS)
    for path in sorted(used):
        content = path.read_text()
        path.write_text(content + " ")
        assert key((), "2") != before, f"a changed {path.name} leaves the old library"
        path.write_text(content)
    assert key((), "2") == before != key(("-O0",), "2")
    assert key((), "2") != key((), "3")


def test_a_source_is_compiled_for_the_levels_at_which_it_differs() -> None:
    every = set(range(len(library.LEVELS)))
    assert set(library.levels_of("quantized_matmul")) == every
    bytes_alone = every - {library.LEVELS.index("avx512_vnni")}
    for room in ("decode", "linear", "rms_norm", "rotary"):
        assert set(library.levels_of(room)) == bytes_alone


def test_a_library_is_on_disk_before_it_has_its_name(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, renamed = [], []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def rename(source: Path, target: Path) -> None:
        renamed.append((os.stat(source).st_ino, list(synced)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    assert build.build().read_text() == "made\n"
    assert renamed
    for number, before in renamed:
        assert number in before, "a power failure would leave a name without the bytes"


def test_a_compiler_that_does_not_run(fake: Path) -> None:
    fake.write_bytes(b"\0 no program")
    with pytest.raises(build.BuildError, match=r"compiler does not run \("):
        build.build()


def test_a_failure_is_forgotten_after_a_while(fake: Path) -> None:
    """Its cause may have been a full disk, or a compiler killed for memory; its messages may be in any encoding."""
    fake.write_bytes(b"#!/bin/sh\necho 'erreur: m\xe9moire' >&2; exit 1\n")
    with pytest.raises(build.BuildError, match="compiler failed; its messages are in"):
        build.build()
    (messages,) = (Path(os.environ["XDG_CACHE_HOME"]) / "easytorch" / "cpu").glob("*.failed")
    fake.write_text(COMPILER)
    path = messages.with_suffix(".so")
    with pytest.raises(build.BuildError, match="failed before"):
        build._compile_into(path, build._compile)
    old = messages.stat().st_mtime - build.REMEMBERED - 1
    os.utime(messages, (old, old))
    build._compile_into(path, build._compile)
    assert path.exists()
    assert not messages.exists()


FORK = """
import os, fcntl, pathlib, tempfile
path = pathlib.Path(tempfile.mkdtemp()) / "lock"
reader, writer = os.pipe()
library._lock.acquire()
with build._locked(path):
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent has looked, with the file of the lock open
        os._exit(0 if library._lock.acquire(blocking=False) else 1)
fcntl.flock(path.open("w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
os.close(writer)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_forked_meanwhile_keeps_no_lock(environment: dict[str, str]) -> None:
    output, error = start(environment, f"exec({FORK!r})").communicate(timeout=300)
    assert output == "0\n", error


def test_removing_old_libraries_beside_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"{number}.so" for number in range(3)]
    paths[0].write_text("")
    assert build._newest_first(paths) == [paths[0]]


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    if build.refusal() is None:
        with pytest.raises(build.BuildError, match="set XDG_CACHE_HOME"):
            build.build()


def test_old_libraries_go(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.so" for number in range(build.KEPT + 3)]
    for age, path in enumerate(paths):
        path.write_text("")
        os.utime(path, (1000 - age, 1000 - age))
    build._trim(paths[0])
    assert sorted(tmp_path.iterdir()) == sorted(paths[: build.KEPT])


@pytest.mark.parametrize("there", [True, False], ids=["built", "not built"])
def test_a_process_that_is_ending_is_told_too(environment: dict[str, str], there: bool) -> None:
    """In handlers of `atexit` no pool of threads takes work any more."""
    code = "import atexit; atexit.register(lambda: print(library.missing()))"
    process = start(environment, f"build.build(); {code}" if there else code)
    output, errors = process.communicate(timeout=120)
    assert ("does not load" if there else "no C++ kernels") in (output if there else errors), output + errors
    assert "Traceback" not in errors
