"""The Pallas kernel over pages compiled by the real TPU compiler at its default block sizes: it fits vector memory."""

from __future__ import annotations

# name -> tokens, sequences, H, K (0: pages of three dimensions), D, Dv, page_size, settings. "padded": the rotated key
# fills whole lanes, by zeros
CASES = {
    "Llama 8B, decode": (64, 64, 32, 8, 128, 128, 16, {}),
    "Llama 8B, prefill": (2048, 16, 32, 8, 128, 128, 128, {"left": 4095}),
    "DeepSeek-V3 padded, decode": (64, 64, 128, 0, 640, 512, 64, {}),
    "DeepSeek-V3, prefill": (2048, 16, 128, 0, 576, 512, 64, {"softcap": 30.0}),
}


def programs():
    from functools import partial

    import jax

    from easytorch.kernels.attention.jax_call import AttentionCall
    from easytorch.kernels.interop.tpu_compile import CHIPS, compile_for_tpu
    from easytorch.kernels.ragged_page.pallas_or_jax import ragged_page_attention

    def struct(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    for name, (N, B, H, K, D, Dv, page, settings) in CASES.items():
        key = struct(2048, page, *([K] if K else []), D)
        tables = (struct(*shape, dtype="int32") for shape in ((B,), (B, 4096 // page), (B + 1,)))
        arrays = (struct(N, H, D), None, key, None, key if K else None, *tables, struct(1, dtype="int32"))
        call = AttentionCall(sinks=struct(H), scale=0.1, right=0)._replace(**settings)
        for chip in CHIPS if name.endswith("decode") else ["v5e"]:
            compile_here = partial(compile_for_tpu, topology=CHIPS[chip], value_dim=Dv)
            yield f"{name}, {chip}", partial(compile_here, ragged_page_attention, *arrays, call)


def test_compiles_for_every_chip(compiled):
    for name, figures in compiled.items():
        assert figures["kernels"] >= 1, name


def test_pages_of_whole_lanes_are_read_where_they_lie(compiled):
    """XLA lays other widths out with the pages innermost, and would copy the whole cache for the kernel, each call."""
    for case, (_, _, _, heads, width, _, page_size, _) in CASES.items():
        for name, figures in compiled.items():
            if case.endswith("decode") and name.startswith(f"{case}, v"):
                assert figures["temporary"] < 2048 * page_size * max(heads, 1) * width * 2 / 2, name
