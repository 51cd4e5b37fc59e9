"""The rooms of docs/architecture.md: which of them may import which, read off the code by AST."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# room -> rooms it may import besides itself: docs/architecture.md's arrows, followed to their ends.
_RUNTIME = {"operations", "kernels"}
_MODELS = _RUNTIME | {"layers", "protocol", "bridge", "cache"}
_AUTO = _MODELS | {"models"}
_TOP = _AUTO | {"auto", "generation", "training", "distributed", "backends", "frontend"}
ARROWS = {
    "kernels": set(),
    "bridge": set(),
    "backends": set(),
    "frontend": {"backends"},
    "operations": {"kernels"},
    "cache": set(),
    "layers": _RUNTIME | {"cache"},
    "protocol": _RUNTIME | {"layers", "bridge", "cache"},
    "models": _MODELS,
    "auto": _AUTO,
    "distributed": _AUTO | {"auto"},
    "generation": _AUTO | {"auto"},
    "training": _AUTO | {"auto", "distributed"},
    "cli": _TOP,
}


def room_of(path: Path) -> str | None:
    """The room a file stands in; None for the package's own top-level files."""
    parts = path.relative_to(ROOT).parts
    if parts[0] in ("kernels", "bridge"):
        return parts[0]
    return parts[1] if len(parts) > 2 else None


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """(line, absolute module name) of every import of a file, those inside functions too."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    if package[0] in ("kernels", "bridge"):
        package = ("easytorch", *package)
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def source_files() -> list[Path]:
    files = [path for room in ("easytorch", "kernels", "bridge") for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 20, "the rooms were not found: is the checkout complete?"
    return files


SOURCES = source_files()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_the_rooms_its_own_may(path: Path) -> None:
    room = room_of(path)
    for line, module in imported_modules(path):
        parts = module.split(".")
        assert parts[0] not in ("kernels", "bridge"), f"{path}:{line}: say easytorch.{parts[0]}, not {parts[0]}"
        if room is None or parts[0] != "easytorch" or len(parts) < 2 or parts[1] == room:
            continue
        if parts[1] in ARROWS:
            assert parts[1] in ARROWS[room], f"{path}:{line}: {room} may not import {module}"


def test_every_room_has_its_arrows() -> None:
    rooms = {room_of(path) for path in SOURCES} - {None}
    assert rooms <= set(ARROWS), f"rooms without a line in ARROWS: {rooms - set(ARROWS)}"


def test_no_module_is_named_like_a_package_it_could_hide() -> None:
    taken = {"jax", "triton", "torch", "torch_xla", "transformers", "numpy", "safetensors", "flax", "msgpack", "rich"}
    clashes = [path for path in SOURCES if path.stem in taken or path.parent.name in taken]
    assert clashes == []


@pytest.mark.parametrize("room", ["kernels", "bridge"])
def test_the_rooms_beside_the_package_are_not_regular_packages(room: str) -> None:
    assert not (ROOT / room / "__init__.py").exists(), f"{room}/__init__.py would hide the PyPI package {room!r}"
    folders = {path.parent for path in (ROOT / room).rglob("*.py")} - {ROOT / room}
    assert folders and all((folder / "__init__.py").is_file() for folder in folders)


def test_the_import_reader_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above are only as good as `imported_modules`."""
    probe = tmp_path / "bridge" / "formats" / "probe.py"
    probe.parent.mkdir(parents=True)
    probe.write_text(
        "import jax\nfrom easytorch.kernels import x\ndef f():\n    from easytorch import auto\n    from .. import y\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert room_of(probe) == "bridge"
    assert [module for _, module in sorted(imported_modules(probe))] == [
        "jax",
        "easytorch.kernels.x",
        "easytorch.auto",
        "easytorch.bridge.y",
    ]
