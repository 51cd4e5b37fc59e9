"""The Pallas flash kernels compiled by the real TPU compiler at their default block sizes: they fit vector memory."""

from __future__ import annotations

# name -> B, T, S, H, K, D, Dv, dtype, and settings of the kernel; "all" has every optional input
EVERYWHERE = {"Llama": ((1, 4096, 4096, 4, 1, 128, 128, "bfloat16"), {"right": 0})}
ONCE = {
    "Gemma 2": ((1, 4096, 4096, 2, 1, 256, 256, "bfloat16"), {"left": 4095, "right": 0, "softcap": 50.0}),
    "float32": ((1, 2048, 2048, 2, 1, 128, 128, "float32"), {"right": 0}),
    "MLA, expanded": ((1, 2048, 2048, 2, 2, 192, 128, "bfloat16"), {"right": 0}),
    "odd": ((1, 63, 301, 6, 2, 60, 36, "bfloat16"), {"left": 40, "right": 3}),
    "all": ((1, 1500, 1700, 4, 2, 80, 80, "bfloat16"), {"left": 900, "right": 0, "softcap": 4.0, "dropout_prob": 0.1}),
}


def programs():
    from functools import partial

    import jax
    import jax.numpy as jnp

    from easytorch.kernels.attention.jax_call import AttentionCall
    from easytorch.kernels.attention.pallas_or_jax import flash_backward, flash_forward
    from easytorch.kernels.interop.tpu_compile import CHIPS, compile_for_tpu

    def struct(*shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    def definition(query, key, value):
        scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value.astype(jnp.float32))

    yield "definition", partial(compile_for_tpu, definition, *[struct(1, 4096, 8, 128, dtype="bfloat16")] * 3)
    for name, ((B, T, S, H, K, D, Dv, dtype), settings) in {**EVERYWHERE, **ONCE}.items():
        query, key, value = (struct(B, *x, dtype=dtype) for x in ((T, H, D), (S, K, D), (S, K, Dv)))
        call = AttentionCall(scale=D**-0.5, **settings)
        if name == "all":
            call = AttentionCall(
                struct(1, 1, T, S, dtype=bool), struct(1, H, T, S, dtype="float32"), struct(B, T, dtype="int32"),
                struct(B, S, dtype="int32"), struct(H, dtype="float32"), struct(dtype="int32"),
                *call.numbers,
            )  # fmt: skip
        given = (query, key, value, call)
        output, logsumexp = struct(B, T, H, Dv, dtype=dtype), struct(B, H, 2, T, dtype="float32")
        for chip in CHIPS if name in EVERYWHERE else ["v5e"]:
            compile_here = partial(compile_for_tpu, topology=CHIPS[chip])
            yield f"{name}, {chip}, forward", partial(compile_here, flash_forward, *given)
            yield f"{name}, {chip}, backward", partial(compile_here, flash_backward, *given, output, logsumexp, output)


def test_the_measure_sees_the_scores_of_the_definition(compiled):
    assert compiled["definition"]["temporary"] > 8 * 4096 * 4096 * 4


def test_every_kernel_compiles(compiled):
    for name, figures in compiled.items():
        if name != "definition":
            assert figures["kernels"] >= (2 if name.endswith("backward") else 1), name


def test_memory_is_far_below_the_scores(compiled):
    for case, ((B, T, S, H, *_), _settings) in {**EVERYWHERE, **ONCE}.items():
        for name, figures in compiled.items():
            # a bias has a gradient as large as the scores
            if name.startswith(f"{case}, v") and case not in ("all", "odd"):
                assert figures["temporary"] < B * H * T * S * 4 / 8, name
