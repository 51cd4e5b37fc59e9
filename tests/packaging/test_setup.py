"""setup.py lists every package of the three rooms, and pyproject.toml what must be installed beside them."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_with_code_is_a_package(monkeypatch):
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **settings: given.update(settings))
    runpy.run_path(str(ROOT / "setup.py"))
    folders = {path.parent for room in ("easytorch", "kernels", "bridge") for path in (ROOT / room).rglob("*.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    expected = {name if name.split(".")[0] == "easytorch" else f"easytorch.{name}" for name in names}
    assert set(given["packages"]) == expected | {"easytorch.kernels"}  # it holds folders only
    assert given["package_dir"] == {"easytorch.kernels": "kernels", "easytorch.bridge": "bridge"}


def test_the_project_runs_where_it_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    lowest, tested = (
        next(
            line.removeprefix("transformers==")
            for line in (ROOT / f"scripts/requirements/{name}.txt").read_text().splitlines()
            if line.startswith("transformers==")
        )
        for name in ("lowest", "test")
    )
    needs = next(need for need in project["dependencies"] if need.startswith("transformers"))
    floor, ceiling = needs.removeprefix("transformers>=").split(",<")
    assert floor == lowest
    major, minor, _ = tested.split(".")  # nothing newer than what the tests run on: a minor release renames arguments
    assert ceiling == f"{major}.{int(minor) + 1}"
    assert project["scripts"] == {"easytorch": "easytorch.cli.main:main"}
