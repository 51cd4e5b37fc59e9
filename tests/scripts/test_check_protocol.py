"""The acceptance of the module protocol on one model of each kind of call; the script takes the others too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_protocol.py"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_name(capsys):
    spec = importlib.util.spec_from_file_location("check_protocol", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(["--models", "llama", "mpt"]) == 0, capsys.readouterr().out
