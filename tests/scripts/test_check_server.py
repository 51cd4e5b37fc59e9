"""A sample of `scripts/check_server.py`: clients that are killed, requests that make no sense, SIGTERM."""

from __future__ import annotations

import pytest

from tests.scripts_loaded import load_script


def test_the_server_under_faults(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("check_server")
    assert script.main(["--clients", "16", "--mutations", "40"]) == 0, capsys.readouterr().out
    fault = script.Answer(b"HTTP/1.1 500 x\r\n\r\nTraceback").fault(range(400, 500))  # what the sweep is to notice
    assert fault is not None and "status 500" in fault
    assert "without an error object" in script.Answer(b'HTTP/1.1 400 x\r\n\r\n{"detail": 1}').fault(range(400, 500))
