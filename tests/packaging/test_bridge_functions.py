"""`easytorch.bridge.convert` and its kin: functions by attribute, by import, and loaded only when used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from easytorch.bridge_names import FUNCTIONS

LOADED = "assert not [m for m in sys.modules if m in ('torch', 'jax', 'transformers', 'numpy')], 'loads too much'"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_an_attribute_and_an_import(name: str) -> None:
    code = (
        f"import sys, easytorch; {LOADED}; f = easytorch.bridge.{name}; assert callable(f); "
        f"from easytorch.bridge import {name} as g; assert f is g; "
        f"from easytorch.bridge.{name} import {name} as h; assert callable(h) and f.__wrapped__ is h; "
        f"assert f.__doc__ == h.__doc__"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_calling_the_module_calls_the_function() -> None:
    import easytorch

    with pytest.raises(ValueError, match="known targets"):
        easytorch.bridge.convert("a", "b", to="nothing")


def test_any_other_name_is_an_attribute_error() -> None:
    import easytorch

    with pytest.raises(AttributeError, match="save_tree"):
        _ = easytorch.bridge.nothing
