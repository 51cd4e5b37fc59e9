"""The table of choices: every operation on every platform, without a device and without loading a kernel library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from easytorch.kernels.interop import installed
from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.platform import PLATFORMS
from easytorch.operations.dispatch.table import choices


def test_every_operation_on_every_platform() -> None:
    rows = choices()
    primary = {OperationRegistry.get(name).primary_name() for name in OperationRegistry.names()}
    assert {(row.operation, row.platform) for row in rows} == {(name, p) for name in primary for p in PLATFORMS}
    assert all(row.reason for row in rows)
    assert rows[0]._fields == ("operation", "platform", "implementation", "backend", "reason")


def test_what_absent_platforms_would_pick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(installed.INSTALLED, "jax", True)
    found = {row.platform: (row.implementation, row.backend) for row in choices() if row.operation == "attention"}
    assert found["tpu"] == ("flash", "xla")
    monkeypatch.setitem(installed.INSTALLED, "jax", False)
    found = {row.platform: (row.implementation, row.reason) for row in choices() if row.operation == "attention"}
    assert found["tpu"][0] == "vanilla"
    assert "jax is not installed" in found["tpu"][1]


def test_a_refused_force_is_a_row_too() -> None:
    rows = [row for row in choices(OperationMetadata(backend="triton")) if row.operation == "sdpa"]
    assert {(row.implementation, row.backend) for row in rows} == {("-", "-")}
    assert "sdpa has no backend 'triton'" in rows[0].reason


def test_nothing_heavy_is_loaded_and_nothing_is_logged() -> None:
    program = (
        "import sys; from easytorch.operations.dispatch.table import choices; choices(); "
        "print([m for m in ('jax', 'triton', 'torch_xla', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    assert run.stdout.strip() == "[]"
    assert run.stderr == ""
