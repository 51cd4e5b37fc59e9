"""A train step over four chips, compiled by the real TPU compiler; more of them by scripts/check_train_step.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_step_over_fsdp_and_tp_compiles_for_v5e() -> None:
    if find_spec("libtpu") is None or find_spec("jax") is None:
        pytest.skip("needs jax and libtpu: pip install 'easytorch[tpu]'")
    from easytorch.kernels.interop.tpu_compile import ENVIRONMENT

    program = (
        "import dataclasses, json\n"
        "from scripts.check_train_step import compiled_for_tpu\n"
        "print(json.dumps(dataclasses.asdict(compiled_for_tpu('dense', 'fsdp=2,tp=2', 'v5e:2x2', layers=1))))\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={
            **os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        },
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert {"all-reduce", "all-gather"} <= found["collectives"].keys()
    # the state is a quarter of the model's, and stays in its memory
    assert 0 < found["outputs"] - found["reused"] < 0.1 * found["arguments"]
    assert found["flops"] > 0 and found["temporary"] > 0
