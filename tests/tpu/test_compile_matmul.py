"""The matmuls of experts and of quantized weights compiled by the real TPU compiler, on a host without one.

Their blocks fit into vector memory, and no dequantized weight, nor one expert's rows times all experts, is
materialized.
"""

from __future__ import annotations

import pytest

# name -> rows, dtype, format; 64 experts of 2048 by 1408, or a layer of 4096 by 4096
EVERYWHERE = {
    "experts, prompt": (32768, "bfloat16", None),
    "int4, prompt": (512, "bfloat16", "int4"),
    "fp8, prompt": (512, "bfloat16", "fp8_e4m3fn"),
}
# few rows, the same kernels at twice the bytes, and the other formats
ONCE = {
    "experts, decode": (512, "bfloat16", None),
    "int4, decode": (1, "bfloat16", "int4"),
    "experts, float32": (4096, "float32", None),
    "int4, float32": (512, "float32", "int4"),
    "nf4": (1, "bfloat16", "nf4"),
    "int8": (1, "bfloat16", "int8"),
    "fp8_e5m2": (1, "bfloat16", "fp8_e5m2"),
}
CASES = {**EVERYWHERE, **ONCE}


def programs():
    from functools import partial

    import jax
    import jax.numpy as jnp

    from easytorch.kernels.grouped_matmul import pallas_or_jax
    from easytorch.kernels.interop.tpu_compile import CHIPS, compile_for_tpu
    from easytorch.kernels.quantized_matmul import pallas_or_jax as quantized_module
    from easytorch.kernels.quantized_matmul.formats import FORMATS

    def struct(*shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    def experts(rows, dtype):
        x, weight = struct(rows, 2048, dtype=dtype), struct(64, 2048, 1408, dtype=dtype)
        call = (x, weight, struct(64, dtype=jnp.int32), None)
        return pallas_or_jax, call, struct(rows, 1408, dtype=dtype), {"transposed": False}

    def quantized(rows, dtype, name):
        kind, size = FORMATS[name], 4096
        stored = getattr(jnp, str(kind.dtype).removeprefix("torch."))
        group_size = kind.group_size or size
        data = struct(size, size // 2 if kind.packed else size, dtype=stored)
        scale = struct(size, size // group_size, dtype=jnp.float32)
        zero = struct(*scale.shape, dtype=jnp.uint8) if name == "int4" else None
        x = struct(rows, size, dtype=dtype)
        return quantized_module, (x, None, data, scale, zero), x, {"format": name, "group_size": group_size}

    for name, (rows, dtype, kind) in CASES.items():
        module, call, grad, static = experts(rows, dtype) if kind is None else quantized(rows, dtype, kind)
        for chip in CHIPS if name in EVERYWHERE else ["v5e"]:
            compile_here = partial(compile_for_tpu, topology=CHIPS[chip], **static)
            yield f"{name}, {chip}, forward", partial(compile_here, module.forward, *call)
            yield f"{name}, {chip}, backward", partial(compile_here, module.backward, *call, grad, grad)


@pytest.mark.parametrize("name", CASES)
def test_compiles_and_forms_nothing_large(compiled, name):
    rows, _, kind = CASES[name]
    found = {program: figures for program, figures in compiled.items() if program.startswith(f"{name}, v")}
    assert found
    # dequantized it would be 32 MiB; even and odd columns of x and of its gradient are 8, the bits of fp8, which
    # XLA copies, 16. A product with every expert would be 64 outputs
    limit = 2**20 + 4 * rows * 1408 if kind is None else 2**25 if kind.startswith("fp8") else 2**24
    for program, figures in found.items():
        assert figures["kernels"] == (2 if kind is None and program.endswith("backward") else 1), program
        assert figures["temporary"] < limit, program
