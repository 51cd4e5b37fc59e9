"""The Pallas flash kernels compiled by the real TPU compiler at their default block sizes: they fit vector memory."""

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

# name -> B, T, S, H, K, D, Dv, dtype, and settings of the kernel; "all" has every optional input
EVERYWHERE = {
    "Llama": ((1, 4096, 4096, 4, 1, 128, 128, "bfloat16"), {"right": 0}),
    "Gemma 2": ((1, 4096, 4096, 2, 1, 256, 256, "bfloat16"), {"left": 4095, "right": 0, "softcap": 50.0}),
}
ONCE = {
    "float32": ((1, 2048, 2048, 2, 1, 128, 128, "float32"), {"right": 0}),
    "MLA, expanded": ((1, 2048, 2048, 2, 2, 192, 128, "bfloat16"), {"right": 0}),
    "odd": ((1, 63, 301, 6, 2, 60, 36, "bfloat16"), {"left": 40, "right": 3}),
    "all": ((1, 1500, 1700, 4, 2, 80, 80, "bfloat16"), {"left": 900, "right": 0, "softcap": 4.0, "dropout_prob": 0.1}),
}

# A process of its own: libtpu and its environment stay out of the other tests.
SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
from easytorch.kernels.attention.tpu_flash import flash_backward, flash_forward
from easytorch.kernels.interop.tpu_compile import compile_for_tpu

def struct(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)

def definition(query, key, value, *, scale):
    scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scale * scores), value.astype(jnp.float32))

wide = struct(1, 4096, 8, 128, dtype="bfloat16")
formed = compile_for_tpu(definition, wide, wide, wide, scale=1.0).memory_analysis().temp_size_in_bytes
results = {"definition": {"temporary": formed, "scores": 8 * 4096 * 4096 * 4}}
for name, topologies, (B, T, S, H, K, D, Dv, dtype), settings in json.loads(sys.argv[1]):
    settings["scale"] = D**-0.5
    query, key, value = (struct(B, *x, dtype=dtype) for x in ((T, H, D), (S, K, D), (S, K, Dv)))
    optional = [None] * 6
    if name == "all":
        optional = [
            struct(1, 1, T, S, dtype=bool), struct(1, H, T, S, dtype="float32"), struct(B, T, dtype="int32"),
            struct(B, S, dtype="int32"), struct(H, dtype="float32"), struct(dtype="int32"),
        ]
    given = (query, key, value, *optional)
    output, logsumexp = struct(B, T, H, Dv, dtype=dtype), struct(B, H, T, dtype="float32")
    for topology in topologies:
        forward = compile_for_tpu(flash_forward, *given, topology=topology, **settings)
        backward = compile_for_tpu(flash_backward, *given, output, logsumexp, output, topology=topology, **settings)
        for direction, compiled in (("forward", forward), ("backward", backward)):
            results[f"{name}, {topology}, {direction}"] = {
                "kernels": compiled.as_text().count("tpu_custom_call"),
                "temporary": compiled.memory_analysis().temp_size_in_bytes,
                "scores": B * H * T * S * 4,
            }
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def compiled():
    from easytorch.kernels.interop.tpu_compile import ENVIRONMENT

    cases = [(name, TOPOLOGIES, *case) for name, case in EVERYWHERE.items()]
    cases += [(name, ["v5e:2x2"], *case) for name, case in ONCE.items()]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(cases)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_the_measure_sees_the_scores_of_the_definition(compiled):
    assert compiled["definition"]["temporary"] > compiled["definition"]["scores"]


def test_every_kernel_compiles_for_every_chip(compiled):
    kernels = {name: figures for name, figures in compiled.items() if name != "definition"}
    assert len(kernels) == 2 * (len(EVERYWHERE) * len(TOPOLOGIES) + len(ONCE))
    for name, figures in kernels.items():
        assert figures["kernels"] >= (2 if "backward" in name else 1), name


def test_memory_is_far_below_the_scores(compiled):
    for name, figures in compiled.items():
        if not name.startswith(("all", "odd", "definition")):  # a bias has a gradient as large as the scores
            assert figures["temporary"] < figures["scores"] / 8, name
