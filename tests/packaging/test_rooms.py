"""The rooms of docs/architecture.md: which of them may import which, read off the code by AST.

The table there is the law. An import that it does not list fails, and so does an arrow that no import needs, or a room
that is not there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import easytorch

ROOT = Path(__file__).resolve().parents[2]
# | `room/` | what it holds | the rooms it imports |
_ROW = re.compile(r"^\| `(?:easytorch/)?(\w+)/` \| .+ \| (.+) \|$", re.MULTILINE)
# | `easytorch/module.py` | what it holds | the rooms that import it |
_ROW_OF_TOP = re.compile(r"^\| `easytorch/(\w+)\.py` \| .+ \| (.+) \|$", re.MULTILINE)
_ROW_OF_BRIDGE = re.compile(r"^\| `bridge/(\w+)/` \| .+ \| (.+) \|$", re.MULTILINE)


def arrows(row: re.Pattern[str]) -> dict[str, set[str]]:
    """Room -> the rooms it imports, as docs/architecture.md has them."""
    rows = row.findall((ROOT / "docs" / "architecture.md").read_text())
    return {room: set(re.findall(r"`(\w+)`", imports)) for room, imports in rows}


ARROWS = arrows(_ROW)
# | `room.module` of the bridge | the rooms outside of it that import that |
INSIDE_BRIDGE = arrows(re.compile(r"^\| `(\w+\.\w+)` \| (.+) \|$", re.MULTILINE))
# `errors` and `dtypes` stand at the bridge's top for users, and are what its core is made of.
IN_BRIDGE = arrows(_ROW_OF_BRIDGE)
OF_CORE = {"errors", "dtypes"}


LINES, LINES_OF_FUNCTION = 513, 114


def sources() -> list[Path]:
    return [path for folder in ("easytorch", "kernels", "bridge") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_files_and_functions_are_short() -> None:
    long = []
    for path in sources():
        text = path.read_text()
        long += [(path, text.count("\n"))] if text.count("\n") > LINES else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long += [(path, f"{node.name}: {lines}")] if lines > LINES_OF_FUNCTION else []
    assert not long, f"split them: a file has at most {LINES} lines, a function {LINES_OF_FUNCTION}: {long}"


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


def imported_rooms(path: Path) -> list[tuple[int, str]]:
    """(line, room) of every import of a file from another room, public names of `easytorch` by where they live."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text(), str(path))) if isinstance(node, ast.Attribute)]
    # `import easytorch` is light; `easytorch.AutoModel` loads `easytorch.auto`.
    used = [(node.lineno, ast.unparse(node)) for node in nodes if ast.unparse(node.value) == "easytorch"]
    found = []
    for line, module in [*imported_modules(path), *used]:
        parts = module.split(".")
        if parts[0] == "easytorch" and len(parts) > 1:
            room = easytorch._HOME.get(parts[1], f"easytorch.{parts[1]}").split(".")[1]
            if room != room_of(path) and ((ROOT / room).is_dir() or (ROOT / "easytorch" / room).is_dir()):
                found.append((line, room))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_the_rooms_its_own_may(path: Path) -> None:
    for line, module in imported_modules(path):
        assert module.split(".")[0] not in ("kernels", "bridge"), f"{path}:{line}: say easytorch.{module}"
    if (room := room_of(path)) is None:
        return
    for line, other in imported_rooms(path):
        assert other in ARROWS[room], f"{path}:{line}: {room} imports {other}, which docs/architecture.md does not list"


def importers_of_top_level() -> dict[str, set[str]]:
    """Module at the package's top -> the rooms that import it; of `easytorch` itself, only what is not passed on."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        for _, module in imported_modules(path):
            parts = module.split(".")
            if (room := room_of(path)) is None or parts[0] != "easytorch":
                continue
            if len(parts) > 1 and (ROOT / "easytorch" / f"{parts[1]}.py").is_file():
                found.setdefault(parts[1], set()).add(room)
            elif len(parts) == 1 or parts[1] == "__version__":
                found.setdefault("__init__", set()).add(room)
    return found


def test_the_modules_at_the_top_are_imported_by_the_rooms_that_the_page_lists() -> None:
    listed, used = arrows(_ROW_OF_TOP), importers_of_top_level()
    assert listed.keys() == {path.stem for path in (ROOT / "easytorch").glob("*.py")}
    assert {name: rooms for name, rooms in listed.items() if rooms} == used
    assert not {"kernels", "bridge"} & set().union(*used.values()), "these rooms import nothing of the package"


# The rooms that modules at the top import: the public names, the command line, and what stands in for other rooms.
OF_TOP = {
    "__init__": {"auto", "operations"},
    "__main__": {"cli"},
}


def test_the_modules_at_the_top_import_few_rooms() -> None:
    found: dict[str, set[str]] = {}
    for path in (path for path in SOURCES if room_of(path) is None):
        if rooms := {room for _, room in imported_rooms(path)}:
            found[path.stem] = rooms
    assert found == OF_TOP


def test_public_names_count_as_imports_of_their_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = tmp_path / "easytorch" / "training" / "probe.py"
    probe.parent.mkdir(parents=True)
    for room in ("auto", "operations"):
        (tmp_path / "easytorch" / room).mkdir()
    probe.write_text("import easytorch\nx = easytorch.AutoModel\nfrom easytorch import OperationRegistry\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert sorted(imported_rooms(probe)) == [(2, "auto"), (3, "operations")]


def test_the_rooms_of_the_page_are_those_there_are() -> None:
    assert set(ARROWS) == {room_of(path) for path in SOURCES} - {None}


def test_the_figure_has_every_room() -> None:
    drawn = re.findall(r"<text[^>]*>(\w+)</text>", (ROOT / "docs" / "rooms.svg").read_text(encoding="utf-8"))
    assert set(drawn) == set(ARROWS)


def test_every_arrow_of_the_page_is_an_import() -> None:
    drawn = {(room, other) for room, others in ARROWS.items() for other in others}
    assert drawn == {(room_of(path), other) for path in SOURCES if room_of(path) for _, other in imported_rooms(path)}


def room_of_bridge(parts: Sequence[str]) -> str:
    """The room of the bridge that a module is in, by its name below `bridge`; "public" for the verbs at its top, and
    "checkpoint", which jobs open too."""
    if (ROOT / "bridge" / parts[0]).is_dir():
        return parts[0]
    return "core" if parts[0] in OF_CORE else "checkpoint" if parts[0] == "checkpoint" else "public"


def arrows_of_bridge() -> dict[tuple[str, str], str]:
    """(room, imported room) -> an import of one of the bridge's rooms by another."""
    found = {}
    for path in SOURCES:
        if room_of(path) == "bridge":
            room = room_of_bridge(path.relative_to(ROOT / "bridge").with_suffix("").parts)
            for line, module in imported_modules(path):
                if module.startswith("easytorch.bridge."):
                    other = room_of_bridge(module.split(".")[2:])
                    found[room, other] = f"{path.relative_to(ROOT)}:{line}: {module}"
    return {(room, other): where for (room, other), where in found.items() if room != other}


def test_the_rooms_of_the_bridge_import_what_the_page_lists() -> None:
    listed = {(room, other) for room, others in IN_BRIDGE.items() for other in others}
    public = {("public", "checkpoint"), ("jobs", "checkpoint")} | {("public", room) for room in IN_BRIDGE}
    allowed = listed | public | {("checkpoint", room) for room in IN_BRIDGE if room != "jobs"}
    used = arrows_of_bridge()
    assert {where for arrow, where in used.items() if arrow not in allowed} == set()
    assert listed <= set(used), "the page lists imports that there are none of"


def test_other_rooms_import_of_the_inside_of_the_bridge_what_the_page_lists() -> None:
    used: dict[str, set[str]] = {}
    for path in SOURCES:
        for _, module in imported_modules(path):
            parts = module.split(".")
            inside = module.startswith("easytorch.bridge.") and (ROOT / "bridge" / parts[2]).is_dir()
            if inside and (room := room_of(path) or f"easytorch/{path.name}") != "bridge":
                used.setdefault(".".join(parts[2:4]), set()).add(room)
    assert used == INSIDE_BRIDGE


def test_the_folders_of_the_bridge_do_not_import_one_another() -> None:
    """Rooms go in no circle, imports inside functions counted; nor do the formats, each a folder of its own."""
    rooms: dict[Path, set[Path]] = {}
    for room, other in arrows_of_bridge():
        rooms.setdefault(Path(room), set()).add(Path(other))
    assert cycle_in(rooms) == []
    formats = ROOT / "bridge" / "formats"
    folders = {path.name for path in formats.iterdir() if (path / "__init__.py").is_file()}
    between: dict[Path, set[Path]] = {}
    for path in formats.rglob("*.py"):
        for _, module in imported_modules(path):
            parts = module.split(".")[3:4] if module.startswith("easytorch.bridge.formats.") else []
            if path.parent.name in folders and parts and parts[0] in folders - {path.parent.name}:
                between.setdefault(Path(path.parent.name), set()).add(Path(parts[0]))
    assert cycle_in(between) == []


def test_the_rooms_of_the_bridge_are_those_there_are() -> None:
    assert set(IN_BRIDGE) == {path.name for path in (ROOT / "bridge").iterdir() if (path / "__init__.py").is_file()}


def test_of_formats_schemes_import_the_config_of_gguf_alone() -> None:
    schemes = [path for path in SOURCES if path.parent == ROOT / "bridge" / "schemes"]
    found = {module for path in schemes for _, module in imported_modules(path) if ".bridge.formats." in module}
    assert found and all(module.startswith("easytorch.bridge.formats.gguf_files.") for module in found), found


def imports_when_loaded(path: Path) -> set[Path]:
    """The files that importing a file imports: not those inside functions, and not those for type checkers."""
    names: set[str] = set()

    def place(name: str) -> Path | None:
        parts = name.split(".")
        inside = parts[1:] if parts[:2] in (["easytorch", "kernels"], ["easytorch", "bridge"]) else parts
        module = ROOT.joinpath(*inside)
        return next((file for file in (module.with_suffix(".py"), module / "__init__.py") if file.is_file()), None)

    def walk(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                # A submodule by its package, or a name in it.
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
                names.update(name if place(name) else node.module or "" for name in modules)
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                walk(node.orelse)
            elif isinstance(node, ast.ClassDef | ast.If | ast.Try | ast.With):
                walk(node.body)
                walk(getattr(node, "orelse", []))

    walk(ast.parse(path.read_text(), str(path)).body)
    return {file for name in names if (file := place(name)) is not None} - {path}


def cycle_in(graph: dict[Path, set[Path]]) -> list[Path]:
    """Files each of which imports the next, the last one the first; none where the imports are a tree."""
    done: set[Path] = set()

    def search(file: Path, above: list[Path]) -> list[Path]:
        if file in above:
            return above[above.index(file) :]
        if file not in done:
            for other in sorted(graph.get(file, ())):
                if found := search(other, [*above, file]):
                    return found
            done.add(file)
        return []

    return next((found for file in graph if (found := search(file, []))), [])


def test_no_imports_go_in_a_circle() -> None:
    # `easytorch` itself gives its public names from other rooms when they are asked for.
    graph = {path: imports_when_loaded(path) - {ROOT / "easytorch" / "__init__.py"} for path in SOURCES}
    assert [str(path.relative_to(ROOT)) for path in cycle_in(graph)] == []


def test_a_circle_is_seen() -> None:
    one, two, three = (Path(name) for name in ("one", "two", "three"))
    assert cycle_in({one: {two}, two: {three}, three: {two}}) == [two, three]
    assert cycle_in({one: {two, three}, two: {three}, three: set()}) == []


def test_no_module_is_named_like_a_package_it_could_hide() -> None:
    taken = {"jax", "triton", "torch", "torch_xla", "transformers", "numpy", "safetensors", "flax", "msgpack", "rich"}
    clashes = [path for path in SOURCES if path.stem in taken or path.parent.name in taken]
    assert clashes == []


def test_no_file_of_a_kernel_repeats_its_folder() -> None:
    files = [path for path in (ROOT / "kernels").glob("*/*") if path.suffix in (".py", ".cpp", ".h")]
    names = {path: f"_{path.stem}_" for path in files if path.stem != "__init__"}
    assert [path for path, name in names.items() if f"_{path.parent.name}_" in name] == []


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
