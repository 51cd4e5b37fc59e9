"""The jax operations with a state compiled by the real TPU compiler, at the sizes of models, on a host without one."""

from __future__ import annotations

import pytest

T = 4096
STATES = {"ssm1": 16 * 5120, "ssm2": 80 * 64 * 128, "gated_delta_rule": 32 * 128 * 128}


def programs():
    from functools import partial

    import jax
    import jax.numpy as jnp

    from easytorch.kernels.gated_delta_rule import jax_chunks
    from easytorch.kernels.interop.tpu_compile import CHIPS, compile_for_tpu
    from easytorch.kernels.ssm1 import jax_scan
    from easytorch.kernels.ssm2 import jax_chunks as ssm2_chunks

    def struct(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    half = partial(struct, dtype=jnp.bfloat16)
    tokens, vectors, number = struct(1, T, 5120), struct(1, T, 16), struct(1, T, dtype=jnp.int32)
    groups = [half(1, T, 1, 128)] * 2
    key, value, scalar = struct(1, T, 16, 128), half(1, T, 32, 128), struct(1, T, 32)
    delta_rule = [key, key, value, scalar, scalar, struct(1, 32, 128, 128), number]
    calls = {
        "ssm1": (
            jax_scan.ssm1, jax_scan.ssm1_backward, {},
            [tokens, tokens, struct(16, 5120), vectors, vectors, struct(1, 16, 5120), None],
        ),
        "ssm2": (
            ssm2_chunks.ssm2, ssm2_chunks.ssm2_backward, {"precision": "high"},
            [half(1, T, 80, 64), struct(1, T, 80), struct(80), *groups, struct(1, 80, 64, 128), number],
        ),
        "gated_delta_rule": (
            jax_chunks.gated_delta_rule, jax_chunks.gated_delta_rule_backward,
            {"precision": "high"}, delta_rule,
        ),
    }  # fmt: skip
    for name, (forward, backward, static, given) in calls.items():
        outputs = jax.eval_shape(partial(forward, **static), *given)
        for chip in ("v4", "v5e"):  # plain jax, for which the chips differ little
            compile_here = partial(compile_for_tpu, topology=CHIPS[chip], **static)
            yield f"{name}, {chip}, forward", partial(compile_here, forward, *given)
            if chip == "v5e":
                yield f"{name}, {chip}, backward", partial(compile_here, backward, *given, *outputs, *outputs)


@pytest.mark.parametrize("name", STATES)
def test_memory_is_far_below_a_state_for_every_token(compiled, name):
    found = {program: figures for program, figures in compiled.items() if program.startswith(f"{name}, v")}
    assert found
    for program, figures in found.items():
        assert figures["temporary"] < T * STATES[name] * 4 / 3, program
