"""The acceptance of the module protocol on one model of each kind of call; the script takes the others too."""

from __future__ import annotations

import pytest

from tests.scripts_loaded import load_script


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_name(capsys):
    script = load_script("check_protocol")
    assert script.main(["--models", "llama", "mpt"]) == 0, capsys.readouterr().out
