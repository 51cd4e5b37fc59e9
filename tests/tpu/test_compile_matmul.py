"""The matmuls of experts and of quantized weights compiled by the real TPU compiler, on a host without one.

Their blocks fit into vector memory, and no dequantized weight, nor one expert's rows times all experts, is ever formed.
"""

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
TOPOLOGIES = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"]

# name -> rows, dtype, format; 64 experts of 2048 by 1408, or a layer of 4096 by 4096
CASES = {
    "experts, decode": (512, "bfloat16", None),
    "experts, prompt": (32768, "bfloat16", None),
    "int4, decode": (1, "bfloat16", "int4"),
    "int4, prompt": (512, "bfloat16", "int4"),
    "fp8, prompt": (512, "bfloat16", "fp8_e4m3fn"),
}
# the same kernels at twice the bytes, and the other formats: on one chip
MORE = {
    "experts, float32": (4096, "float32", None),
    "int4, float32": (512, "float32", "int4"),
    "nf4": (1, "bfloat16", "nf4"),
    "int8": (1, "bfloat16", "int8"),
    "fp8_e5m2": (1, "bfloat16", "fp8_e5m2"),
}

# A process of its own: libtpu and its environment stay out of the other tests.
SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
from easytorch.kernels.grouped_matmul import xla_grouped
from easytorch.kernels.interop.tpu_compile import compile_for_tpu
from easytorch.kernels.quantized_matmul import xla_quantized
from easytorch.kernels.quantized_matmul.formats import FORMATS

def struct(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)

def experts(rows, dtype):
    x, weight = struct(rows, 2048, dtype=dtype), struct(64, 2048, 1408, dtype=dtype)
    call = (x, weight, struct(64, dtype=jnp.int32), None)
    grad = struct(rows, 1408, dtype=dtype)
    return xla_grouped, call, grad, {"transposed": False}

def quantized(rows, dtype, name):
    kind, size = FORMATS[name], 4096
    stored = getattr(jnp, str(kind.dtype).removeprefix("torch."))
    group_size = kind.group_size or size
    data = struct(size, size // 2 if kind.packed else size, dtype=stored)
    scale = struct(size, size // group_size, dtype=jnp.float32)
    zero = struct(*scale.shape, dtype=jnp.uint8) if name == "int4" else None
    x = struct(rows, size, dtype=dtype)
    return xla_quantized, (x, None, data, scale, zero), x, {"format": name, "group_size": group_size}

topology, results = sys.argv[1], {}
for name, (rows, dtype, format) in json.loads(sys.argv[2]).items():
    given = experts(rows, dtype) if format is None else quantized(rows, dtype, format)
    module, call, grad, static = given
    compiled = [
        compile_for_tpu(module.forward, *call, topology=topology, **static),
        compile_for_tpu(module.backward, *call, grad, grad, topology=topology, **static),
    ]
    results[name] = {
        "kernels": [each.as_text().count('custom_call_target="tpu_custom_call"') for each in compiled],
        "temporary": max(each.memory_analysis().temp_size_in_bytes for each in compiled),
    }
print(json.dumps(results))
"""


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_compiles(topology):
    from easytorch.kernels.interop.tpu_compile import ENVIRONMENT

    cases = {**CASES, **MORE} if topology.startswith("v5e") else CASES
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, topology, json.dumps(cases)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert set(found) == set(cases)
    for name, (rows, _, format) in cases.items():
        assert found[name]["kernels"] == ([1, 2] if format is None else [1, 1]), name
        # dequantized it would be 32 MiB; even and odd columns of x and of its gradient are 8, the bits of fp8, which
        # XLA copies, 16. A product with every expert would be 64 outputs
        limit = 2**20 + 4 * rows * 1408 if format is None else 2**25 if format.startswith("fp8") else 2**24
        assert found[name]["temporary"] < limit, name
