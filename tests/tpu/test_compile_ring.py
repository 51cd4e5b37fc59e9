"""The ring compiled by the real TPU compiler for four chips: what it sends, and what memory a chip needs for it."""

from __future__ import annotations

T, H, K, D = 16384, 8, 2, 128
# name -> layout, keys to the left
CASES = {"contiguous": ("contiguous", None), "zigzag": ("zigzag", None), "contiguous window": ("contiguous", 1023)}


def programs():
    from functools import partial

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from easytorch.kernels.attention.jax_call import AttentionCall
    from easytorch.kernels.interop.lowering import lower_for_export
    from easytorch.kernels.interop.tpu_compile import CHIPS
    from easytorch.kernels.ring.jax_shard_map import Ring, ring_backward, ring_forward

    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v5e"]).devices
    mesh = Mesh(np.array(devices).reshape(4), ("sp",))

    def struct(*shape, axis=1, dtype=jnp.bfloat16):
        spec = PartitionSpec(*(["sp" if i == axis else None for i in range(len(shape))]))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def compile_sharded(function, ring, *given):
        return lower_for_export(jax.jit(partial(function, ring=ring)).trace(*given)).compile()

    query, key = struct(1, T, H, D), struct(1, T, K, D)
    top = struct(1, H, 2, T, axis=3, dtype=jnp.float32)
    for name, (layout, left) in CASES.items():
        ring, given = Ring(mesh, "sp", layout), (query, key, key, AttentionCall(scale=D**-0.5, left=left, right=0))
        yield f"{name}, forward", partial(compile_sharded, ring_forward, ring, *given)
        if name != "contiguous":  # whose window has the same steps, and fewer
            yield f"{name}, backward", partial(compile_sharded, ring_backward, ring, *given, query, top, query)


def test_keys_go_round_and_nobody_gathers_them(compiled):
    scores = H * (T // 4) ** 2 * 2  # of one chip's queries and one chip's keys, in bfloat16
    for name, found in compiled.items():
        assert found["gathers"] == 0 and found["kernels"] >= 2, name
        assert found["sends"] >= (2 if "window" in name else 6), name  # to every other chip or to the next
        assert found["temporary"] < scores / 2, name


def test_a_window_sends_less(compiled):
    assert compiled["contiguous window, forward"]["sends"] < compiled["contiguous, forward"]["sends"]
