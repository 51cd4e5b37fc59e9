"""The Pallas decode kernel compiled by the real TPU compiler at its default block sizes: it fits vector memory."""

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
# name -> topologies, B, S, H, K, D, dtype, features, settings
CASES = {
    "Llama 8B": (TOPOLOGIES, 8, 8192, 32, 8, 128, "bfloat16", ["lengths"], {}),
    "Llama 7B, every head alone": (("v5e:2x2",), 8, 4096, 32, 32, 128, "bfloat16", ["lengths"], {}),
    "float32, odd length": (("v5e:2x2",), 2, 3001, 16, 16, 64, "float32", [], {"left": 511}),
    "every feature": (
        ("v4:2x2x1",), 4, 5000, 64, 8, 64, "bfloat16",
        ["lengths", "mask", "bias", "segments", "sinks"], {"left": 127, "softcap": 30.0},
    ),
    "one head of 256": (("v6e:2x2",), 4, 4096, 8, 1, 256, "bfloat16", ["lengths", "bias"], {}),
}  # fmt: skip

# A process of its own: libtpu and its environment stay out of the other tests.
SCRIPT = """
import json, sys
import jax
from easytorch.kernels.decode.tpu_decode import decode
from easytorch.kernels.interop.tpu_compile import compile_for_tpu

def struct(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)

results = {}
for name, (topologies, B, S, H, K, D, dtype, features, settings) in json.loads(sys.argv[1]).items():
    extras = {
        "lengths": [struct(B, dtype="int32")], "mask": [struct(B, 1, 1, S, dtype="bool")],
        "bias": [struct(1, H, 1, S, dtype=dtype)], "segments": [struct(B, n, dtype="int32") for n in (1, S)],
        "sinks": [struct(H, dtype=dtype)],
    }
    arrays = [struct(B, 1, H, D, dtype=dtype), *[struct(B, S, K, D, dtype=dtype)] * 2]
    arrays += [x for n, given in extras.items() for x in (given if n in features else [None] * len(given))]
    for topology in topologies:
        compiled = compile_for_tpu(decode, *arrays, topology=topology, scale=0.1, **settings)
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
    assert len(kernels) == sum(len(case[0]) for case in CASES.values())
    assert all(kernels.values()), kernels
