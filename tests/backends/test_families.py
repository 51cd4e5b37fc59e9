"""An operation is in the file of its family everywhere: where it is recorded, checked and computed."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

from easytorch.backends import builder_ops, shapeinference
from easytorch.backends.aten import ops as aten_ops
from easytorch.backends.reference import ops as reference_ops
from easytorch.backends.types import OpType
from easytorch.backends.xla import ops as xla_ops

NOT_FAMILIES = {"rule", "recorder", "table"}
# Control flow walks graphs, and is bound where those are: interpreter.py and aten/lowering.py.
ELSEWHERE = {reference_ops: {"control"}, aten_ops: {"control"}, xla_ops: set()}


def modules(package: ModuleType) -> dict[str, ModuleType]:
    names = {module.name for module in pkgutil.iter_modules(package.__path__)} - NOT_FAMILIES
    return {name: importlib.import_module(f"{package.__name__}.{name}") for name in sorted(names)}


def tabled(module: ModuleType) -> set[OpType]:
    """The keys of the module's own table, which stands last in it."""
    source = Path(module.__file__ or "").read_text()
    names = re.findall(r"^([A-Z]+): dict\[OpType, ", source, re.MULTILINE)
    return {op_type for name in names for op_type in getattr(module, name)}


FAMILY = {op_type: name for name, module in modules(shapeinference).items() for op_type in tabled(module)}


def test_every_operation_has_one_family() -> None:
    assert FAMILY.keys() == shapeinference.RULES.keys()
    counted = sum(len(tabled(module)) for module in modules(shapeinference).values())
    assert counted == len(FAMILY)


@pytest.mark.parametrize("package", [reference_ops, aten_ops, xla_ops], ids=lambda package: package.__name__)
def test_a_backend_computes_it_in_the_file_of_that_name(package: ModuleType) -> None:
    found = {op_type: name for name, module in modules(package).items() for op_type in tabled(module)}
    assert len(found) > 100
    assert {op_type: name for op_type, name in found.items() if FAMILY[op_type] != name} == {}
    assert set(modules(package)) == set(FAMILY.values()) - ELSEWHERE[package]


def test_the_builder_records_it_in_the_file_of_that_name() -> None:
    recorded = {
        OpType[op_type]: name
        for name, module in modules(builder_ops).items()
        for op_type in re.findall(r"OpType\.([A-Z0-9_]+)", Path(module.__file__ or "").read_text())
    }
    assert len(recorded) > 100
    assert {op_type: name for op_type, name in recorded.items() if FAMILY[op_type] != name} == {}
