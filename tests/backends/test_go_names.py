"""docs/backends.md: every name of GoMLX's page has a row, and every row's Python name is there."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from easytorch import backends
from easytorch.backends.shapeinference import RULES
from easytorch.backends.types import GO_OP_TYPES, OP_TYPES

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `([^`]+)` \| `backends\.([^`]+)` \| ([^|]+) \|$", re.MULTILINE)
ROWS = {go: (python, status.strip()) for go, python, status in ROW.findall((ROOT / "docs" / "backends.md").read_text())}


def found(path: str) -> bool:
    here: object = backends
    for part in path.split("."):
        fields = [field.name for field in dataclasses.fields(here)] if dataclasses.is_dataclass(here) else []
        if not hasattr(here, part) and part not in fields:
            return False
        here = getattr(here, part, None)
    return True


@pytest.mark.parametrize("go", ROWS)
def test_the_python_name_of_a_row_is_there(go: str) -> None:
    python, status = ROWS[go]
    assert found(python), f"{go}: easytorch.backends.{python} does not exist"
    assert status, f"{go} has no status"


def test_the_table_was_read() -> None:
    assert len(ROWS) > 250
    assert not found("Builder.nothing") and not found("nothing")


def test_every_operation_has_a_row_a_method_and_a_rule() -> None:
    assert len(GO_OP_TYPES) == 99
    for op_type in GO_OP_TYPES:
        assert ROWS[f"OpType{op_type.go_name}"][0] == f"OpType.{op_type.name}"
    for op_type in OP_TYPES:
        assert callable(getattr(backends.Builder, op_type.method)), op_type
        if op_type not in (backends.OpType.PARAMETER, backends.OpType.CONSTANT):
            assert op_type in RULES, op_type


def test_every_name_of_the_go_page_has_a_row() -> None:
    page = ROOT.parent / "shared" / "reference" / "gomlx_backends.txt"
    if not page.is_file():
        pytest.skip(f"no {page}: GoMLX's page is not on this machine")
    text = page.read_text()
    functions = set(re.findall(r"^func (\w+)", text, re.MULTILINE))
    methods = {f"{kind}.{name}" for kind, name in re.findall(r"^func \((?:\w+ )?(\w+)\) (\w+)", text, re.MULTILINE)}
    types = set(re.findall(r"^type (\w+) ", text, re.MULTILINE))
    op_types = {name for name in re.findall(r"\bOpType[A-Z]\w+", text) if not name.startswith(("OpTypeS", "OpTypeV"))}
    op_types |= {f"OpType{op.go_name}" for op in GO_OP_TYPES}
    interfaces = re.findall(r"^type (\w+) interface \{(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    members = {
        f"{kind}.{name}" for kind, body in interfaces for name in re.findall(r"^(\w+)\(.*\)?", body, re.MULTILINE)
    }
    missing = (functions | methods | types | op_types | members) - set(ROWS)
    assert not missing, f"without a row in docs/backends.md: {sorted(missing)}"


@pytest.mark.parametrize("op_type", [op for op in GO_OP_TYPES if f"StandardOps.{op.go_name}" in ROWS], ids=str)
def test_the_arguments_of_an_operation_are_gos_in_order(op_type: backends.OpType) -> None:
    page = ROOT.parent / "shared" / "reference" / "gomlx_backends.txt"
    if not page.is_file():
        pytest.skip(f"no {page}: GoMLX's page is not on this machine")
    signature = re.search(rf"^{op_type.go_name}\((.*?)\) \(", page.read_text(), re.MULTILINE)
    assert signature is not None
    names = [part.split()[0] for part in signature[1].split(", ")]
    snake = [
        re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", n.replace("DType", "Dtype").replace("FFT", "Fft")).lower()
        for n in names
    ]
    method = getattr(backends.Builder, op_type.method)
    assert [name for name in inspect.signature(method).parameters if name != "self"] == snake
