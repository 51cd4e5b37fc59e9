"""The jax operations with a state compiled by the real TPU compiler, at the sizes of models, on a host without one."""

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
STATES = {"ssm1": 16 * 5120, "ssm2": 80 * 64 * 128, "gated_delta_rule": 32 * 128 * 128}

# A process of its own: libtpu and its environment stay out of the other tests.
SCRIPT = """
import functools, json, sys
import jax, jax.numpy as jnp
from easytorch.kernels.gated_delta_rule import xla_gated_delta_rule
from easytorch.kernels.interop.tpu_compile import compile_for_tpu
from easytorch.kernels.ssm1 import xla_ssm1
from easytorch.kernels.ssm2 import xla_ssm2

struct, half, T = jax.ShapeDtypeStruct, jnp.bfloat16, 4096
f32 = functools.partial(struct, dtype=jnp.float32)
tokens, vectors = f32((1, T, 5120)), f32((1, T, 16))
number = struct((1, T), jnp.int32)
heads = [struct((1, T, 80, 64), half), f32((1, T, 80)), f32((80,)), *[struct((1, T, 1, 128), half)] * 2]
key, value, scalar = f32((1, T, 16, 128)), struct((1, T, 32, 128), half), f32((1, T, 32))
calls = {
    "ssm1": (xla_ssm1.ssm1, [tokens, tokens, f32((16, 5120)), vectors, vectors, f32((1, 16, 5120)), None]),
    "ssm2": (xla_ssm2.ssm2, [*heads, f32((1, 80, 64, 128)), number]),
    "gated_delta_rule": (
        xla_gated_delta_rule.gated_delta_rule, [key, key, value, scalar, scalar, f32((1, 32, 128, 128)), number]
    ),
}
backward = {
    "ssm1": xla_ssm1.ssm1_backward, "ssm2": xla_ssm2.ssm2_backward,
    "gated_delta_rule": xla_gated_delta_rule.gated_delta_rule_backward,
}
results = {}
for name, (function, given) in calls.items():
    static = {} if name == "ssm1" else {"precision": "high"}
    outputs = jax.eval_shape(functools.partial(function, **static), *given)
    # the newest chip compiles the backward pass too: the others differ from it by their memories
    for topology in sys.argv[1:]:
        compiled = compile_for_tpu(function, *given, topology=topology, **static)
        results[f"{name} {topology}"] = compiled.memory_analysis().temp_size_in_bytes
    compiled = compile_for_tpu(backward[name], *given, *outputs, *outputs, topology=topology, **static)
    results[f"{name} backward"] = compiled.memory_analysis().temp_size_in_bytes
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def memory():
    """Bytes of temporary memory of each operation on each chip, and of its backward pass."""
    from easytorch.kernels.interop.tpu_compile import ENVIRONMENT

    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *TOPOLOGIES],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("topology", [*TOPOLOGIES, "backward"])
@pytest.mark.parametrize("name", STATES)
def test_memory_is_far_below_a_state_for_every_token(memory, name, topology):
    assert memory[f"{name} {topology}"] < 4096 * STATES[name] * 4 / 3
