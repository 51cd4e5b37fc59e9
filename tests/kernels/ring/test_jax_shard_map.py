"""The ring in jax over four virtual CPU devices: the definition in float64, output and every gradient."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# A process of its own: the number of devices is fixed when jax starts.
SCRIPT = """
import functools
import jax, jax.numpy as jnp, numpy as np, torch
from easytorch.kernels.attention import native
from easytorch.kernels.ring.layout import shard, unshard
from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.ring.jax_shard_map import Ring, ring_backward, ring_forward

B, T, H, K, D, DV = 2, 64, 6, 2, 12, 8
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("sp",))

def check(layout, features, settings, with_ids, level=None):
    torch.manual_seed(0)
    shapes = (B, T, H, D), (B, T, K, D), (B, T, K, DV), (H,)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    if level is not None:  # products that are exact, and alike for every key of a row
        leaves[0].data.copy_(leaves[0].data.round() * level)
        leaves[1].data.zero_()[..., 0] = 1.0
        leaves[3].data.copy_(torch.tensor([0.0, level, -level, level, 1.0, -level]) / 4)
    ids = (torch.arange(T) * 3 // T).repeat(B, 1).int() if with_ids else None
    output, _ = native.attention(
        *leaves[:3], sinks=leaves[3], query_segment_ids=ids, key_segment_ids=ids, **features
    )
    grad = torch.randn(output.shape, dtype=torch.float64)
    want = [output, *torch.autograd.grad(output, leaves, grad)]

    def stored(x):
        if x is None:
            return None
        x = torch.cat([shard(x.detach(), rank, 4, 1, layout) for rank in range(4)], 1)
        return jnp.asarray((x.float() if x.is_floating_point() else x).numpy())

    static = {"ring": Ring(mesh, "sp", layout)}
    sinks = jnp.asarray(leaves[3].detach().float().numpy())
    call = AttentionCall(query_segment_ids=stored(ids), key_segment_ids=stored(ids), sinks=sinks, **settings)
    given = [*map(stored, leaves[:3]), call]
    result, top = jax.jit(functools.partial(ring_forward, **static))(*given)
    gradients = jax.jit(functools.partial(ring_backward, **static))(*given, result, top, stored(grad))
    for index, (x, y) in enumerate(zip((result, *gradients[:3], gradients[4]), want, strict=True)):
        x = torch.from_numpy(np.array(x)).double()
        x = unshard(x.chunk(4, 1), 1, layout) if index < 4 else x
        if level is not None and index in (1, 2):
            continue  # sums that cancel to nothing, and sums of terms that large
        error = (x - y).square().mean().sqrt() / y.square().mean().sqrt()
        assert error < 1e-5, (layout, features, index, error)

scale = D**-0.5
check("contiguous", {"causal": True}, {"scale": scale, "right": 0}, True)
check("zigzag", {"causal": True}, {"scale": scale, "right": 0}, False)
settings = {"scale": scale, "left": 8, "right": 2, "softcap": 2.0}
check("zigzag", {"sliding_window": (8, 2), "softcap": 2.0}, settings, True)
for layout, level in (("zigzag", 2.0**20), ("contiguous", 2.0**100)):
    check(layout, {"causal": True, "softmax_scale": 0.25}, {"scale": 0.25, "right": 0}, False, level)
print("ok")
"""


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install 'easytorch[jax]'")
@pytest.mark.jax_cpu
def test_four_devices():
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "ok\n"
