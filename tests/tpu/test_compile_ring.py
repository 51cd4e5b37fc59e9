"""The ring compiled by the real TPU compiler for four chips: what it sends, and what memory a chip needs for it."""

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
T, H, K, D = 16384, 8, 2, 128

# A process of its own: libtpu and its environment stay out of the other tests.
SCRIPT = """
import functools, json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from easytorch.kernels.interop.lowering import lower_for_export
from easytorch.kernels.ring.xla_ring import Ring, Settings, ring_backward, ring_forward

T, H, K, D = json.loads(sys.argv[1])
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = Mesh(np.array(devices).reshape(4), ("sp",))

def struct(*shape, axis=1, dtype=jnp.bfloat16):
    spec = PartitionSpec(*(["sp" if i == axis else None for i in range(len(shape))]))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

results = {}
query, key = struct(1, T, H, D), struct(1, T, K, D)
top = struct(1, H, T, axis=2, dtype=jnp.float32)
for layout, settings in (("contiguous", Settings(D**-0.5, None, 0)), ("zigzag", Settings(D**-0.5, None, 0)),
                         ("contiguous", Settings(D**-0.5, 1023, 0))):
    ring = Ring(mesh, "sp", layout)
    for name, function, given in (("forward", ring_forward, (query, key, key)),
                                  ("backward", ring_backward, (query, key, key, None, None, None, query, top, query))):
        run = jax.jit(functools.partial(function, ring=ring, settings=settings))
        compiled = lower_for_export(run.trace(*given)).compile()
        text = compiled.as_text()
        window = "" if settings.left is None else " window"
        results[f"{layout}{window} {name}"] = {
            "temporary": compiled.memory_analysis().temp_size_in_bytes,
            "sends": text.count("collective-permute-start("),
            "gathers": text.count("all-gather"), "kernels": text.count("tpu_custom_call"),
        }
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def compiled():
    from easytorch.kernels.interop.tpu_compile import ENVIRONMENT

    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([T, H, K, D])],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "contiguous window"])
def test_keys_go_round_and_nobody_gathers_them(compiled, layout, direction):
    found = compiled[f"{layout} {direction}"]
    assert found["gathers"] == 0 and found["kernels"] >= 2
    assert found["sends"] >= (2 if "window" in layout else 6)  # key and value, to every other chip or to the next
    scores = H * (T // 4) ** 2 * 2  # of one chip's queries and one chip's keys, in bfloat16
    assert found["temporary"] < scores / 2


def test_a_window_sends_less(compiled):
    assert compiled["contiguous window forward"]["sends"] < compiled["contiguous forward"]["sends"]
