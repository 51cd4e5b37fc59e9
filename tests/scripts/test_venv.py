"""scripts/lib/venv.sh: environments are made once, rebuilt when their pins change, and never half-made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "scripts" / "lib" / "venv.sh"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def bash(tmp_path):
    """`bash(script)` with venv.sh sourced, in an empty folder; pip may not use the network."""
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PIP_NO_INDEX": "1",
        "EASYTORCH_VENVS": str(tmp_path / "venvs"),
    }

    def start(script: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", f"set -euo pipefail\nsource '{LIBRARY}'\n{script}"],
            cwd=tmp_path, env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(script: str, **variables: str) -> tuple[int, str, str]:
        process = start(script, **variables)
        out, err = process.communicate(timeout=600)
        return process.returncode, out, err

    run.start = start
    return run


@pytest.fixture
def pins(tmp_path):
    """`pins(text)` writes the requirements file."""
    path = tmp_path / "pins.txt"
    path.write_text("# nothing\n")
    return path.write_text


def test_made_once_by_runs_at_once_and_rebuilt_for_other_pins(bash, pins, tmp_path):
    runs = [bash.start("ensure_venv some pins.txt") for _ in range(3)]
    results = [(*run.communicate(timeout=600), run.returncode) for run in runs]
    paths = {out.strip() for out, _, code in results if code == 0}
    assert len(results) == 3 and len(paths) == 1, results
    assert sum("making" in err for _, err, _ in results) == 1
    (path,) = map(Path, paths)
    assert path.parent == tmp_path / "venvs" and path.name.startswith("some-")
    assert subprocess.run([path / "bin" / "python", "-c", "import pip"], check=False).returncode == 0

    pins("# another comment\n\n")
    assert bash("ensure_venv some pins.txt") == (0, f"{path}\n", "")
    (path / ".easytorch-venv").write_text("incomplete\n")
    code, out, err = bash("ensure_venv some pins.txt")
    assert (code, out) == (0, f"{path}\n") and "making" in err
    pins("pip\n")
    code, out, _ = bash("ensure_venv some pins.txt")
    assert code == 0 and Path(out.strip()) != path and path.exists()


def test_a_failed_install_is_tried_again(bash, pins, tmp_path):
    pins("pip\n#stage --no-deps\nno-such-package==1\n")
    for _ in range(2):
        code, _, err = bash("ensure_venv_at place pins.txt")
        assert code != 0
        assert "could not install this part of pins.txt: no-such-package==1" in err
    pins("pip\n")
    code, out, err = bash("ensure_venv_at place pins.txt && place/bin/python -c 'print(1)'")
    assert (code, out) == (0, "1\n") and "making" in err


def test_foreign_folders_are_left_alone(bash, pins, tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "precious").touch()
    code, _, err = bash("ensure_venv_at place pins.txt")
    assert code != 0 and "was not made by this script" in err
    assert (tmp_path / "place" / "precious").exists()


def test_python_that_does_not_fit_is_named(bash, tmp_path):
    old = tmp_path / "oldpython"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1 && exit\nexit 1\n')
    old.chmod(0o755)
    code, out, err = bash("find_python", PYTHON=str(old))
    assert (code, out) == (1, "")
    assert "3.11, 3.12 or 3.13 is needed" in err and "Python 3.8.1" in err
    code, _, err = bash("ensure_venv some pins.txt", PYTHON="/no/such/python")
    assert code != 0 and "/no/such/python (does not run)" in err
