"""The source distribution holds what the checkout holds: scripts, tests and docs too."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_it_has_every_file_of_the_checkout(tmp_path):
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    tree = tmp_path / "tree"
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    code = "from setuptools import build_meta; build_meta.build_sdist('../dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    assert names - held == set()
    assert {name for name in held if name.endswith((".pyc", ".so"))} == set()
