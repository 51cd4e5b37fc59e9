from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from easytorch.cli.main import main


@pytest.mark.parametrize("columns", [20, 40, 200])
def test_no_width_cuts_a_shape_or_a_size(columns, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    name = "model.layers.0.self_attention.output_projection.weight"
    save_file({name: torch.zeros(640, 128)}, tmp_path / "model.safetensors")
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("weight  640x128  float32  328 KB")
    assert lines[-2].endswith("output_projection")
