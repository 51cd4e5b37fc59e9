"""The Pallas decode kernel compiled by the real TPU compiler at its default block sizes: it fits vector memory."""

from __future__ import annotations

# name -> chips (none: all), B, S, H, K, D, dtype, features, settings
CASES = {
    "Llama 8B": ((), 8, 8192, 32, 8, 128, "bfloat16", ["lengths"], {}),
    "Llama 7B, every head alone": (("v5e",), 8, 4096, 32, 32, 128, "bfloat16", ["lengths"], {}),
    "float32, odd length": (("v5e",), 2, 3001, 16, 16, 64, "float32", [], {"left": 511}),
    "every feature": (
        ("v4",), 4, 5000, 64, 8, 64, "bfloat16",
        ["lengths", "mask", "bias", "segments", "sinks"], {"left": 127, "softcap": 30.0},
    ),
    "one head of 256": (("v6e",), 4, 4096, 8, 1, 256, "bfloat16", ["lengths", "bias"], {}),
}  # fmt: skip


def programs():
    from functools import partial

    import jax

    from easytorch.kernels.attention.jax_call import AttentionCall
    from easytorch.kernels.decode.pallas_or_jax import decode
    from easytorch.kernels.interop.tpu_compile import CHIPS, compile_for_tpu

    def struct(*shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    for name, (chips, B, S, H, K, D, dtype, features, settings) in CASES.items():
        ids = [struct(B, n, dtype="int32") if "segments" in features else None for n in (1, S)]
        call = AttentionCall(
            mask=struct(B, 1, 1, S, dtype="bool") if "mask" in features else None,
            bias=struct(1, H, 1, S, dtype=dtype) if "bias" in features else None, query_segment_ids=ids[0],
            key_segment_ids=ids[1], sinks=struct(H, dtype=dtype) if "sinks" in features else None, scale=0.1,
            **settings,
        )  # fmt: skip
        arrays = [struct(B, 1, H, D, dtype=dtype), *[struct(B, S, K, D, dtype=dtype)] * 2]
        arrays.append(struct(B, dtype="int32") if "lengths" in features else None)
        for chip in chips or CHIPS:
            compile_here = partial(compile_for_tpu, topology=CHIPS[chip])
            yield f"{name}, {chip}", partial(compile_here, decode, *arrays, call)


def test_compiles_for_every_chip(compiled):
    for name, figures in compiled.items():
        assert figures["kernels"] >= 1, name
