"""rotary in jax: the plain definition and the Pallas kernel, interpreted, against torch's in float64, and back."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.rotary import native
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error

pytest.importorskip("jax")

# batch, batch of the tables, tokens, heads, head_dim, rotated features
SIZES = [(2, 1, 63, 6, 128, 128), (2, 2, 40, 4, 64, 32), (1, 1, 9, 8, 80, 80)]


def _arrays(size: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    batch, table_batch, length, heads, dim, rotated = size
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, length, heads, dim), (table_batch, length, rotated), (table_batch, length, rotated)
    x, cos, sin = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x.to(dtype), cos, sin]


def _expected(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
    x, cos, sin = x.double(), cos.double(), sin.double()
    if not back:
        return native.rotary(x, x, cos, sin, interleaved=interleaved)[0]
    leaf = torch.zeros_like(x).requires_grad_()
    return torch.autograd.grad(native.rotary(leaf, x, cos, sin, interleaved=interleaved)[0], leaf, x)[0]


@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_definition(size: tuple[int, ...], interleaved: bool, back: bool) -> None:
    _check(size, interleaved, back)


def test_several_blocks_of_tokens_and_heads() -> None:
    _check((1, 1, 600, 12, 128, 2), False, False)


def _check(size: tuple[int, ...], interleaved: bool, back: bool) -> None:
    import jax.numpy as jnp

    from easytorch.kernels.rotary import jax_native, pallas_kernel

    for dtype in (torch.float32, torch.bfloat16):
        x, cos, sin = _arrays(size, dtype)
        expected = _expected(x, cos, sin, interleaved, back)
        x, cos, sin = (jnp.asarray(t.float().numpy()) for t in (x, cos, sin))
        given = (x.astype(str(dtype).removeprefix("torch.")), cos, sin)
        for got in (
            jax_native.turn(*given, interleaved=interleaved, back=back),
            pallas_kernel.turn(*given, interleaved=interleaved, back=back, interpret=True),
        ):
            assert got.dtype == given[0].dtype
            got = torch.from_numpy(jnp.asarray(got, "float32").__array__().copy())
            assert relative_rms_error(got, expected) <= TOLERANCE[dtype]


def test_heads_that_do_not_fill_vectors_are_plain_jax() -> None:
    import jax
    import jax.numpy as jnp

    from easytorch.kernels.rotary import pallas_kernel, pallas_or_jax

    def x(heads: int, dim: int) -> jax.Array:
        return jnp.ones((1, 9, heads, dim))

    assert pallas_kernel.lanes_of(x(2, 64)) == 128
    assert pallas_kernel.lanes_of(x(4, 96)) == 384
    assert pallas_kernel.lanes_of(x(1, 64)) is None
    assert pallas_kernel.lanes_of(x(0, 64)) is None
    assert pallas_kernel.lanes_of(x(2, 64).astype("float16")) is None
    table = jnp.ones((1, 9, 64))
    lowered = jax.jit(pallas_or_jax.rotary).trace(x(2, 64), x(1, 64), table, table).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 1
