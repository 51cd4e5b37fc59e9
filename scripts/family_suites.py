"""transformers' own tests of a family, from a checkout of it, over our classes or its own."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
from transformers.models.auto.auto_factory import _LazyAutoMapping

import tests as our_tests
from tests.models.families import FAMILIES


def folder_of(family: str) -> str:
    """The folder of transformers' tests/models that has the family's: one may have those of several."""
    module = getattr(transformers, FAMILIES[family].heads[0]).__module__
    return str(module.split(".")[2])


def files_of(tests: Path, family: str) -> list[Path]:
    """The files of a checkout's folder of tests that test the family's models; none in a source archive."""
    return sorted((tests / "models" / folder_of(family)).glob("test_modeling_*.py"))


@contextlib.contextmanager
def native_names(folder: str) -> Iterator[None]:
    """Within it `transformers` and its auto mappings have our classes of the families that share `folder`."""
    ours = {
        head: getattr(importlib.import_module(f"easytorch.models.{family}"), head)
        for family, row in FAMILIES.items()
        if folder_of(family) == folder
        for head in row.heads
    }
    values = _LazyAutoMapping.values

    def with_ours(mapping: Any) -> list[Any]:
        return [ours.get(getattr(one, "__name__", ""), one) for one in values(mapping)]

    with contextlib.ExitStack() as stack:
        for name, one in ours.items():
            for module in (transformers, sys.modules["transformers"]):  # which replaces itself as it is loaded
                stack.enter_context(mock.patch.object(module, name, one))
        stack.enter_context(mock.patch.object(_LazyAutoMapping, "values", with_ours))
        yield


def load(tests: Path, files: list[Path], package: str) -> dict[str, unittest.TestCase]:
    """The tests of `files`, by "Class.test", imported as part of `package`, which is made for it."""
    if package not in sys.modules:
        made = types.ModuleType(package)
        made.__path__ = [str(tests)]
        sys.modules[package] = made
        if str(tests) not in our_tests.__path__:  # a few of theirs import others as `tests.exporters`
            our_tests.__path__ = [*our_tests.__path__, str(tests)]
    found: dict[str, unittest.TestCase] = {}
    installed = mock.patch("transformers.utils.direct_transformers_import", lambda *_: transformers)
    with installed, mock.patch("transformers.utils.import_utils.direct_transformers_import", lambda *_: transformers):
        for file in files:
            module = importlib.import_module(".".join((package, *file.relative_to(tests).with_suffix("").parts)))
            for shared in ("causal_lm_tester", "vlm_tester"):
                if (testers := sys.modules.get(f"{package}.{shared}")) is not None:
                    vars(testers)["getattribute_from_module"] = _named  # it looks in the module of the base class
            for name, case in vars(module).items():
                if (
                    isinstance(case, type)
                    and issubclass(case, unittest.TestCase)
                    and case.__module__ == module.__name__
                ):
                    found |= {f"{name}.{one}": case(one) for one in unittest.TestLoader().getTestCaseNames(case)}
    return found


def _of(case: type, module: types.ModuleType) -> bool:
    return case.__module__ == module.__name__  # not those that it imports


def _named(module: Any, name: str) -> Any:
    if hasattr(transformers, name):
        return getattr(transformers, name)
    raise ValueError(name)
