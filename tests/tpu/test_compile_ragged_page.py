"""The Pallas kernel over pages compiled by the real TPU compiler at its default block sizes: it fits vector memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("libtpu") is None or find_spec("jax") is None, reason="needs jax and libtpu: pip install 'easytorch[tpu]'"
)

ROOT = Path(__file__).parents[2]
TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")
# name -> topologies, tokens, sequences, H, K (0: pages of three dimensions), D, Dv, page_size, settings
CASES = {
    "Llama 8B, decode": (TOPOLOGIES, 64, 64, 32, 8, 128, 128, 16, {}),
    "Llama 8B, prefill": (("v5e:2x2",), 2048, 16, 32, 8, 128, 128, 128, {"left": 4095}),
    "DeepSeek-V3, decode": (TOPOLOGIES, 64, 64, 128, 0, 576, 512, 64, {}),
    "DeepSeek-V3, prefill": (("v5e:2x2",), 2048, 16, 128, 0, 576, 512, 64, {"softcap": 30.0}),
}

# A process of its own: libtpu and its environment stay out of the other tests.
SCRIPT = """
import json, sys
import jax
from easytorch.kernels.interop.tpu_compile import compile_for_tpu
from easytorch.kernels.ragged_page.tpu_ragged import ragged_page_attention

def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)

results = {}
for name, (topologies, N, B, H, K, D, Dv, page, settings) in json.loads(sys.argv[1]).items():
    key = struct(2048, page, *([K] if K else []), D)
    tables = (struct(*shape, dtype="int32") for shape in ((B,), (B, 4096 // page), (B + 1,)))
    arrays = (struct(N, H, D), None, key, None, key if K else None, *tables, struct(1, dtype="int32"), struct(H))
    for topology in topologies:
        compiled = compile_for_tpu(
            ragged_page_attention, *arrays, topology=topology, value_dim=Dv, scale=0.1, right=0, **settings
        )
        results[f"{name}, {topology}"] = compiled.as_text().count("tpu_custom_call")
print(json.dumps(results))
"""


def test_compiles_for_every_chip():
    from easytorch.kernels.interop.tpu_compile import ENVIRONMENT

    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(CASES)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    kernels = json.loads(result.stdout.splitlines()[-1])
    assert len(kernels) == 2 * len(TOPOLOGIES) + 2
    assert all(kernels.values()), kernels
