"""The registry knows the format of every checkpoint by the names of its files, and imports no other one's code."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from easytorch.bridge.formats import registry
from easytorch.bridge.formats.base import Format
from easytorch.bridge.formats.known import KNOWN

_spec = importlib.util.spec_from_file_location("bridge_seeds", Path(__file__).parents[1] / "seeds.py")
assert _spec is not None and _spec.loader is not None
seeds = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(seeds)

ROOT = Path(__file__).resolve().parents[3]
CASES = [(format_, make) for format_ in registry.formats() for make in seeds.SEEDS[format_.name]]


def test_formats_are_called_as_the_table_says() -> None:
    assert [known.make().name for known in KNOWN] == [known.name for known in KNOWN]


@pytest.mark.parametrize(("format_", "make"), CASES, ids=[f"{format_.name}-{make.__name__}" for format_, make in CASES])
def test_what_formats_say_of_a_path_needs_no_other_name(
    format_: Format, make: Callable[[Path], None], tmp_path: Path
) -> None:
    """Of the folder, and of each file in it, the registry says what the formats say that it asks or does not ask."""
    make(tmp_path)
    assert format_.detect(tmp_path) is not None
    for path in (tmp_path, *tmp_path.rglob("*")):
        asked: dict[registry.Kind, tuple[Format, Path]] = {}
        for one in registry.formats():
            if (file := one.detect(path)) is not None:
                asked.setdefault(registry.kind_of(one), (one, file))
        assert registry.classify(path) == asked, path


def test_inspect_imports_the_format_it_reads(tmp_path: Path) -> None:
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    code = (
        "import sys; from easytorch.bridge.inspect import inspect; assert inspect(sys.argv[1]).tensors; "
        "rooms = 'easytorch.bridge.formats.', 'easytorch.bridge.schemes.'; "
        "print(*(name for name in sys.modules if name.startswith(rooms)))"
    )
    line = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600, check=True)
    others = ("gguf", "msgpack", "numpy", "orbax", "torch_files", "zarr", "_tree", "gguf_names")
    assert not [name for name in done.stdout.split() if any(one in name for one in others)]
