from __future__ import annotations

import json

import pytest
import torch

from easytorch.cli.main import main
from easytorch.operations.dispatch.platform import PLATFORMS


def output(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["env", *arguments])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_json_has_versions_devices_and_the_reason_of_every_choice(monkeypatch, capsys):
    monkeypatch.setenv("EASYTORCH_CHECK", "0")
    monkeypatch.setenv("HF_TOKEN", "a-secret")
    text = output(capsys, "--json")
    facts = json.loads(text)
    assert torch.__version__.startswith(facts["packages"]["torch"].partition("+")[0])
    assert "jax" in facts["packages"]
    assert facts["cpu"]["cores"] >= 1 and facts["cpu"]["model"]
    assert facts["environment"]["EASYTORCH_CHECK"] == "0"
    assert "a-secret" not in text
    assert {choice["platform"] for choice in facts["operations"]} >= set(PLATFORMS)
    assert {choice["operation"] for choice in facts["operations"]} >= {"attention", "rms_norm", "rotary"}
    assert all(choice["reason"] for choice in facts["operations"])


def test_the_tables_say_the_same(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    text = output(capsys)
    for word in ("Versions", "Devices", "Operations", "torch", "rms_norm", "rocm", "why"):
        assert word in text
