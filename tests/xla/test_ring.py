"""`ring` on xla tensors: alone, and sharded over four virtual devices in one SPMD program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from easytorch.kernels.attention import native
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error

ROOT = Path(__file__).parents[2]


def test_one_device_is_plain_attention():
    torch.manual_seed(0)
    tensors = [torch.randn(2, 19, heads, 8) for heads in (4, 2, 2)]
    attend = OperationRegistry.create("ring")
    got = attend(*(x.to("xla") for x in tensors), causal=True, layout="zigzag").attention_outputs.cpu()
    assert relative_rms_error(got, native.attention(*(x.double() for x in tensors), causal=True)[0]) < 1e-5


def test_four_devices():
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "PYTHONPATH": str(ROOT)}
    script = Path(__file__).with_name("ring_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), "4"], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("ok\n")
