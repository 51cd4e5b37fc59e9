"""A program saved by torch.export runs in another process, which imports easytorch and nothing else of ours."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from easytorch.operations import OperationMetadata, OperationRegistry

_spec = importlib.util.spec_from_file_location("samples_everywhere", Path(__file__).parent / "test_everywhere.py")
assert _spec is not None and _spec.loader is not None
everywhere = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = everywhere
_spec.loader.exec_module(everywhere)

# those whose programs hold an operator of ours, and one whose program does not but gives an output type of ours
NAMES = (
    "attention", "flash", "blocksparse", "ring", "ragged_page_attention", "fused_linear_cross_entropy",
    "grouped_matmul", "quantized_matmul, int4", "ssm1",
)  # fmt: skip

READ = """
import easytorch
import sys, torch
assert "easytorch.operations" not in sys.modules
for path in sys.argv[1:]:
    given, expected = torch.load(path + ".tensors")
    found = torch.export.load(path).module()(*given)
    found = [x for x in torch.utils._pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]
    torch.testing.assert_close(found, expected)
print("read", len(sys.argv) - 1)
"""


class Whole(torch.nn.Module):
    """A sample's call, and its result as the operation gives it."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, *leaves: torch.Tensor) -> Any:
        return self.call.operation(**dict(zip(self.call.names, leaves, strict=True)), **self.call.settings)


def test_another_process_runs_a_saved_program(tmp_path: Path) -> None:
    paths = []
    for number, name in enumerate(NAMES):
        sample = everywhere.SAMPLES[name]
        call, leaves = everywhere.Call(sample), sample.inputs()
        if name == "flash":
            call.operation = OperationRegistry.create("attention", OperationMetadata(backend="flash:aten"))
        module, path = Whole(call), tmp_path / f"{number}.pt2"
        torch.export.save(torch.export.export(module, tuple(leaves)), path)
        expected = [x.detach() for x in torch.utils._pytree.tree_leaves(module(*leaves)) if torch.is_tensor(x)]
        torch.save((leaves, expected), f"{path}.tensors")
        paths.append(str(path))
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", READ, *paths], cwd=root, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == ["read", str(len(NAMES))]
