"""The block-sparse Pallas kernels compiled by the real TPU compiler, on a host without one, for every chip.

At the default block sizes and typical shapes: a kernel that asks for more vector or scalar memory than the chip has
does not compile. Temporary memory stays far below that of the scores.
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
CHIPS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")

# name -> B, T, S, H, K, D, the rule, what else the call has, and the chips
CASES = {
    "window": ((1, 8192, 8192, 8, 2, 128), {"causal": True, "left": 1023}, [], CHIPS),
    "documents": ((2, 8192, 8192, 8, 2, 128), {"causal": True}, ["segments"], CHIPS[1:2]),
    "everything": (
        (2, 2047, 2500, 4, 2, 64),
        {"causal": True, "left": 1000, "right": 100, "chunk_size": 2048, "prefix": True},
        ["segments", "mask", "bias", "sinks", "seed", "prefix", "softcap"],
        CHIPS[1:2],
    ),
}

# A process of its own: libtpu and its environment stay out of the other tests.
SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
from easytorch.kernels.blocksparse.pallas_blocksparse import blocksparse_backward, blocksparse_forward
from easytorch.kernels.blocksparse.pallas_map import Rule
from easytorch.kernels.interop.tpu_compile import compile_for_tpu

def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)

for name, ((B, T, S, H, K, D), rule, extras, chips) in json.loads(sys.argv[1]).items():
    for chip in chips:
        settings = {"rule": Rule(**rule), "scale": D**-0.5}
        if "seed" in extras:
            settings["dropout_prob"] = 0.1
        if "softcap" in extras:
            settings["softcap"] = 30.0
        optional = {
            "mask": struct(B, 1, T, S, dtype=jnp.bool_), "bias": struct(1, H, T, S),
            "query_segments": struct(B, T, dtype=jnp.int32), "key_segments": struct(B, S, dtype=jnp.int32),
            "sinks": struct(H), "seed": struct(dtype=jnp.int32), "prefix": struct(B, dtype=jnp.int32),
        }
        given = [
            x if part in extras or ("segments" in part and "segments" in extras) else None
            for part, x in optional.items()
        ]
        query, key = struct(B, T, H, D), struct(B, S, K, D)
        logsumexp = struct(B, H, T, dtype=jnp.float32)
        programs = {
            "forward": compile_for_tpu(blocksparse_forward, query, key, key, *given, topology=chip, **settings),
            "backward": compile_for_tpu(
                blocksparse_backward, query, key, key, *given, query, logsumexp, query, topology=chip,
                bias_grad="bias" in extras, **settings
            ),
        }
        for direction, program in programs.items():
            text = program.as_text()
            print(json.dumps({
                "chip": chip, "case": name, "direction": direction, "kernels": text.count("tpu_custom_call"),
                "memory": program.memory_analysis().temp_size_in_bytes,
            }), flush=True)
"""


@pytest.fixture(scope="module")
def programs() -> list[dict]:
    from easytorch.kernels.interop.tpu_compile import ENVIRONMENT

    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(CASES)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_kernel_compiles(programs: list[dict]) -> None:
    assert len(programs) == 2 * sum(len(chips) for _, _, _, chips in CASES.values())
    for program in programs:
        assert program["kernels"] >= (1 if program["direction"] == "forward" else 2), program


def test_memory_is_far_below_the_scores(programs: list[dict]) -> None:
    for program in programs:
        batch, length, keys, heads, *_ = CASES[program["case"]][0]
        if program["case"] != "everything":  # a bias has a gradient as large as the scores
            assert program["memory"] < batch * heads * length * keys * 2 / 8, program
