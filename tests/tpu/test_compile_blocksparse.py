"""The block-sparse Pallas kernels compiled by the real TPU compiler, on a host without one.

At the default block sizes and typical shapes: a kernel that asks for more vector or scalar memory than the chip has
does not compile. Temporary memory stays far below that of the scores.
"""

from __future__ import annotations

# name -> B, T, S, H, K, D, the rule, and what else the call has
CASES = {
    "window": ((1, 8192, 8192, 8, 2, 128), {"causal": True, "left": 1023}, []),
    "documents": ((2, 8192, 8192, 8, 2, 128), {"causal": True}, ["segments"]),
    "everything": (
        (2, 2047, 2500, 4, 2, 64),
        {"causal": True, "left": 1000, "right": 100, "chunk_size": 2048, "prefix": True},
        ["segments", "mask", "bias", "sinks", "seed", "prefix", "softcap"],
    ),
}


def programs():
    from functools import partial

    import jax
    import jax.numpy as jnp

    from easytorch.kernels.attention.jax_call import AttentionCall
    from easytorch.kernels.blocksparse.pallas_attention import blocksparse_backward, blocksparse_forward
    from easytorch.kernels.blocksparse.structure import Rule
    from easytorch.kernels.interop.tpu_compile import CHIPS, compile_for_tpu

    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    for name, ((B, T, S, H, K, D), rule, extras) in CASES.items():
        optional = {
            "mask": struct(B, 1, T, S, dtype=jnp.bool_), "bias": struct(1, H, T, S),
            "query_segment_ids": struct(B, T, dtype=jnp.int32), "key_segment_ids": struct(B, S, dtype=jnp.int32),
            "sinks": struct(H), "seed": struct(dtype=jnp.int32),
        }  # fmt: skip
        given = {x: y for x, y in optional.items() if x in extras or ("segment" in x and "segments" in extras)}
        call = AttentionCall(
            **given, scale=D**-0.5, softcap=30.0 if "softcap" in extras else None,
            dropout_prob=0.1 if "seed" in extras else 0.0,
        )  # fmt: skip
        prefix = struct(B, dtype=jnp.int32) if "prefix" in extras else None
        query, key, logsumexp = struct(B, T, H, D), struct(B, S, K, D), struct(B, H, 2, T, dtype=jnp.float32)
        tensors = (query, key, key, call, prefix)
        for chip in CHIPS if name == "window" else ["v5e"]:
            compile_here = partial(compile_for_tpu, topology=CHIPS[chip], rule=Rule(**rule))
            yield f"{name}, {chip}, forward", partial(compile_here, blocksparse_forward, *tensors)
            backward = partial(blocksparse_backward, bias_grad="bias" in extras)
            yield f"{name}, {chip}, backward", partial(compile_here, backward, *tensors, query, logsumexp, query)


def test_every_kernel_compiles(compiled) -> None:
    for name, figures in compiled.items():
        assert figures["kernels"] >= (1 if name.endswith("forward") else 2), name


def test_memory_is_far_below_the_scores(compiled) -> None:
    for name, figures in compiled.items():
        batch, length, keys, heads, *_ = CASES[name.split(",")[0]][0]
        if not name.startswith("everything"):  # a bias has a gradient as large as the scores
            assert figures["temporary"] < batch * heads * length * keys * 2 / 8, name
