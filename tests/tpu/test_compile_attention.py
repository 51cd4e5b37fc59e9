"""The attention kernel compiled by the real TPU compiler, on a host without one: memory stays far below the scores'."""

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

# name -> B, T, S, H, K, D and settings of the kernel
CASES = {
    "causal": ((1, 4096, 4096, 8, 2, 128), {"right": 0}),
    "window, softcap, D 64": ((2, 4096, 4096, 4, 4, 64), {"left": 511, "right": 0, "softcap": 30.0}),
    "bidirectional, odd lengths": ((1, 4097, 5003, 4, 4, 64), {}),
    "dropout": ((1, 4096, 4096, 4, 4, 128), {"right": 0, "dropout_prob": 0.1}),
}

# A process of its own: libtpu and its environment stay out of the other tests.
SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
from easytorch.kernels.attention.xla_flash import flash_backward, flash_forward
from easytorch.kernels.interop.tpu_compile import compile_for_tpu

def definition(query, key, value, *, scale):
    scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scale * scores), value.astype(jnp.float32))

def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)

def temporary(compiled):
    return compiled.memory_analysis().temp_size_in_bytes

results = {}
for name, ((B, T, S, H, K, D), settings) in json.loads(sys.argv[1]).items():
    settings["scale"] = D**-0.5
    query, key, value = struct(B, T, H, D), struct(B, S, K, D), struct(B, S, K, D)
    seed = struct(dtype=jnp.int32) if "dropout_prob" in settings else None
    given = (query, key, value, None, None, None, None, None, seed)
    logsumexp = struct(B, H, T, dtype=jnp.float32)
    results[name] = {
        "forward": temporary(compile_for_tpu(flash_forward, *given, **settings)),
        "backward": temporary(compile_for_tpu(flash_backward, *given, query, logsumexp, query, **settings)),
    }
wide = struct(1, 4096, 8, 128)
results["definition"] = temporary(compile_for_tpu(definition, wide, wide, wide, scale=1.0))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def memory():
    """Bytes of temporary memory of each case's forward and backward, and of the definition's forward."""
    from easytorch.kernels.interop.tpu_compile import ENVIRONMENT

    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(CASES)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_memory_is_far_below_the_scores(memory, name, direction):
    batch, length, keys, heads, *_ = CASES[name][0]
    scores = batch * heads * length * keys * 2  # in bfloat16
    assert memory[name][direction] < scores / 32


def test_the_measure_sees_the_scores_of_the_definition(memory):
    assert memory["definition"] > 8 * 4096 * 4096 * 4
