"""rotary compiled by the real TPU compiler: the kernel fits vector memory, and needs no other pass over the heads."""

from __future__ import annotations

# name -> B, T, H, K, head_dim, rotated features, dtype, interleaved
EVERYWHERE = {"Llama": (2, 4096, 32, 8, 128, 128, "bfloat16", False)}
ONCE = {
    "GPT-J": (1, 2048, 16, 16, 256, 64, "bfloat16", True),
    "heads of 64": (2, 1024, 32, 4, 64, 64, "float32", False),
    "Phi-2": (1, 2048, 32, 32, 80, 32, "bfloat16", False),
    "odd": (3, 63, 6, 2, 128, 128, "float32", True),
    "one token": (8, 1, 32, 8, 128, 128, "bfloat16", False),
}


def programs():
    from functools import partial

    import jax
    import jax.numpy as jnp

    from easytorch.kernels.interop.tpu_compile import CHIPS, compile_for_tpu
    from easytorch.kernels.rotary.pallas_or_jax import rotary

    def definition(query, key, cos, sin):
        """native.py's steps."""

        def turn(x):
            first, second = jnp.split(x, 2, -1)
            return x * cos[:, :, None] + jnp.concatenate((-second, first), -1) * sin[:, :, None]

        return turn(query), turn(key)

    def projected(turn, x, query_weight, key_weight, cos, sin, **settings):
        """Heads as a layer makes them and as attention takes them."""
        heads = [(x @ w).reshape(*x.shape[:2], -1, cos.shape[-1]) for w in (query_weight, key_weight)]
        return [turned.transpose(0, 2, 1, 3) for turned in turn(*heads, cos, sin, **settings)]

    for name, (B, T, H, K, D, R, dtype, interleaved) in {**EVERYWHERE, **ONCE}.items():
        shapes = (B, T, H, D), (B, T, K, D), (1, T, R), (1, T, R)
        structs = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        for chip in CHIPS if name in EVERYWHERE else ["v5e"]:
            for back in (False, True):
                yield (
                    f"{name}, {chip}, {'backward' if back else 'forward'}",
                    partial(
                        compile_for_tpu, rotary, *structs, topology=CHIPS[chip], interleaved=interleaved, back=back
                    ),
                )
    shapes = (1, 2048, 1024), (1024, 2048), (1024, 512), (1, 2048, 128), (1, 2048, 128)
    structs = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    for name, turn in (("definition", definition), ("kernel", rotary)):
        yield f"projected by the {name}", partial(compile_for_tpu, partial(projected, turn), *structs)


def test_every_kernel_compiles(compiled):
    for name, figures in compiled.items():
        expected = 0 if "definition" in name else 2
        assert figures["kernels"] == expected, name


def test_what_projections_make_is_turned_in_one_pass(compiled):
    heads = 2048 * (16 + 4) * 128 * 2
    moved = {name: compiled[f"projected by the {name}"]["bytes"] for name in ("definition", "kernel")}
    assert moved["definition"] - moved["kernel"] > 2 * 2 * heads
