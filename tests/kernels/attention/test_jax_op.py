"""The jax attention as torch operators: opcheck, the bits of dropout, linear memory, layouts and lifetime."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed: pip install 'easytorch[jax]'")
pytestmark = pytest.mark.jax_cpu

from easytorch.kernels.attention import jax_op, native  # noqa: E402


def _inputs(length: int = 20, requires_grad: bool = False) -> list[torch.Tensor]:
    shapes = ((1, length, 4, 8), (1, length, 2, 8), (1, length, 2, 6))
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]


@pytest.mark.parametrize("extras", [False, True])
def test_opcheck(extras: bool) -> None:
    tensors = _inputs(requires_grad=True)
    ids = torch.zeros(1, 20, dtype=torch.int64)
    optional: list[Any] = [None] * 6
    if extras:
        mask, bias = torch.rand(20, 20) > 0.2, torch.randn(4, 1, 20, requires_grad=True)
        optional = [mask, bias, ids, ids, torch.randn(4, requires_grad=True), torch.tensor(3)]
    arguments = (*tensors, *optional, 0.3, None, 0, 2.0 if extras else None, 0.2 if extras else 0.0)
    torch.library.opcheck(torch.ops.easytorch.jax_flash_forward.default, arguments)
    with torch.no_grad():
        output, logsumexp = torch.ops.easytorch.jax_flash_forward(*arguments)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    backward = (torch.randn_like(output), output, logsumexp, *plain, extras)
    torch.library.opcheck(torch.ops.easytorch.jax_flash_backward.default, backward)


@pytest.mark.parametrize("seed", [0, -7, 2**31 - 1, 2**32 + 11, torch.tensor(99)])
def test_dropout_drops_the_same_weights_bit_for_bit(seed: Any) -> None:
    length = 70
    q, k = torch.zeros(2, length, 4, 8), torch.zeros(2, length, 2, 8)
    v = torch.eye(length).reshape(1, length, 1, length).repeat(2, 1, 2, 1)  # the output is the weights
    got = jax_op.attention(q, k, v, dropout_prob=0.4, seed=seed)
    expected = native.attention(q, k, v, dropout_prob=0.4, seed=seed)[0]
    assert torch.equal(got == 0, expected == 0)
    torch.testing.assert_close(got, expected)


def test_layouts_and_expanded_tensors() -> None:
    q, k, v = _inputs()
    expected = native.attention(q, k, v, bias=torch.ones(20, 20))[0]
    strided = [torch.empty(*x.shape, 2).select(-1, 0).copy_(x) for x in (q, k, v)]
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for variant in (strided, transposed):
        got = jax_op.attention(*variant, bias=torch.ones(1).expand(20, 20))
        torch.testing.assert_close(got, expected)


def test_the_result_outlives_and_is_independent_of_the_inputs() -> None:
    q, k, v = _inputs()
    expected = native.attention(q, k, v)[0]
    got = jax_op.attention(q, k, v)
    for x in (q, k, v):
        x.zero_()
    del q, k, v, x
    again = jax_op.attention(*_inputs())
    again.zero_()
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_empty_sequences(lengths: tuple[int, int]) -> None:
    queries, keys = lengths
    q = torch.randn(1, queries, 2, 4, requires_grad=True)
    k = torch.randn(1, keys, 2, 4, requires_grad=True)
    sinks = torch.zeros(2, requires_grad=True)
    output = jax_op.attention(q, k, k, sinks=sinks)
    assert torch.equal(output, torch.zeros(1, queries, 2, 4))
    assert all((g == 0).all() for g in torch.autograd.grad(output.sum(), (q, k, sinks)))


def test_memory_is_linear_in_the_length() -> None:

    import jax
    import jax.numpy as jnp

    from easytorch.kernels.attention import jax_flash
    from easytorch.kernels.attention.jax_call import AttentionCall

    def temporaries(length: int) -> tuple[int, int]:
        x = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.float32)
        rows = jax.ShapeDtypeStruct((1, 4, length), jnp.float32)
        call = AttentionCall(right=0)
        forward, backward = jax.jit(jax_flash.flash_forward), jax.jit(jax_flash.flash_backward)
        compiled = forward.lower(x, x, x, call).compile(), backward.lower(x, x, x, call, x, rows, x).compile()
        return tuple(c.memory_analysis().temp_size_in_bytes for c in compiled)

    short, long = temporaries(1024), temporaries(4096)
    scores = 4 * 4096 * 4096 * 4  # bytes of all scores
    for few, many in zip(short, long, strict=True):
        assert many <= 4.2 * few
        assert many < scores / 8
