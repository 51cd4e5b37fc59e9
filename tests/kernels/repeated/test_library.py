"""The extension of repeated calls: built for one Python and torch, and done without where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.cpu import build as kernels
from easytorch.kernels.repeated import build, library

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the C++ kernels are built on Linux and macOS only")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, which the extension has not been loaded from."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_module", None)
    monkeypatch.setattr(library, "_reason", None)
    return tmp_path / "easytorch" / "repeated"


def compiler(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_without_headers_python_finds_the_calls(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    library.load()
    assert library.module() is None and not cache.exists()
    assert library.described().startswith("found in Python: Python.h is not in ")


def test_a_compiler_that_fails_is_asked_once(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", compiler(tmp_path / "compiler", f"echo asked >> {log}; exit 1"))
    for _ in range(2):
        library.load()
    assert library.module() is None and log.read_text() == "asked\n"
    assert library.described().startswith("found in Python: the C++ compiler failed")


def test_what_is_no_extension_does_not_load(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writes = 'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo no > "$2"; fi; shift; done'
    monkeypatch.setenv("CXX", compiler(tmp_path / "compiler", writes))
    assert library.described() == "not built yet: compiled with the C++ kernels"
    library.load()
    assert library.module() is None and "does not load (" in library.described()


def test_it_may_be_turned_off_and_needs_python_with_its_lock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYTORCH_CPU_KERNELS", "0")
    assert library.described() == "found in Python: EASYTORCH_CPU_KERNELS=0"
    get = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else get(name))
    assert build.refusal() == "it is made for CPython with its lock"


def test_each_python_and_torch_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(flags: tuple[str, ...] = ("-O2",), version: str = "2.13.0") -> str:
        return build._key.__wrapped__(flags, version)

    get, own = sysconfig.get_config_var, key()
    assert len({own, key(("-O1",)), key(version="2.12.0")}) == 3 and key() == own
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: ".other.so" if name == "EXT_SUFFIX" else get(name))
    assert key() != own


def test_another_layout_of_tensors_is_noticed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        def set_tensors(self, *given: Any) -> bool:
            return False

    assert library.module() is None or not library.module().set_tensors(torch.empty(1), 1, torch.empty(1), 2)
    with pytest.raises(kernels.BuildError, match="lays out"):
        library._tell(Elsewhere())
    with monkeypatch.context() as patched:
        patched.setattr(library, "switches", lambda: ({}, "flag", {}, "level", -1))
        with pytest.raises(kernels.BuildError, match="says otherwise"):
            library._tell(type("Module", (), {"set_tensors": staticmethod(lambda *given: True)}))


def test_an_image_has_both_and_a_process_without_a_compiler_loads_them(tmp_path: Path) -> None:
    if (reason := build.refusal()) is not None or not kernels.built(kernels.library_path()):
        pytest.skip(reason or "the C++ kernels are not built")
    code = "from easytorch.kernels.repeated import library; library.load(); print(library.described())"
    build.build()
    environment = {**os.environ, "PATH": str(tmp_path)}
    environment.pop("CXX", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("found in C++: "), done.stdout + done.stderr
