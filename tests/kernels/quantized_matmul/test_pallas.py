"""The quantized matmul for TPU on the CPU: the Pallas kernels interpreted, and what jax runs where there is no TPU."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.quantized_matmul.formats import FORMATS
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error

pytest.importorskip("jax", reason="jax is not installed: pip install easytorch[jax]")

KINDS = [*FORMATS, "int4_zero"]
# groups within the lanes of a tile, of several tiles, of odd columns
CASES = [("row", (36, 61)), ("tensor", (36, 61)), (16, (36, 60)), (64, (300, 1000)), (512, (130, 1536))]


def jax_array(tensor: torch.Tensor):
    from easytorch.kernels.interop.dlpack import to_jax

    return to_jax(tensor.detach())


def torch_tensor(array) -> torch.Tensor:
    from easytorch.kernels.interop.dlpack import to_torch

    return to_torch(array)


def made(kind: str, group_size: int | str, shape: tuple[int, int]) -> QuantizedWeight:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 8
    return quantize(weight, kind.removesuffix("_zero"), group_size, symmetric=not kind.endswith("_zero"))


def in_bytes(weight: QuantizedWeight):
    """data, scale and zero as the kernels read them."""
    import jax

    rows, groups = weight.shape[0], weight.scale.shape[1]
    bits = weight.data if weight.data.dtype == torch.int8 else weight.data.view(torch.uint8)
    zero = None if weight.zero is None else jax_array(weight.zero.float().expand(rows, groups).contiguous())
    scale = jax_array(weight.scale.expand(rows, groups).contiguous())
    return jax.lax.bitcast_convert_type(jax_array(bits), "int8"), scale, zero


@pytest.mark.parametrize(
    ("kind", "case"), [*((kind, case) for kind in KINDS for case in CASES[2:4]), *(("int4_zero", c) for c in CASES)]
)
def test_the_kernels_interpreted(kind: str, case) -> None:
    from easytorch.kernels.quantized_matmul import pallas_kernels

    weight = made(kind, *case)
    rows, columns = weight.shape
    settings = {"format": weight.format, "group_size": weight.group_size, "interpret": True}
    dtype = torch.bfloat16 if case[0] == 16 else torch.float32
    x, grad = torch.randn(19, columns).to(dtype), torch.randn(19, rows).to(dtype)
    wide = weight.dequantize(torch.float64)
    got = pallas_kernels.quantized_matmul(jax_array(x), *in_bytes(weight), **settings)
    assert relative_rms_error(torch_tensor(got), x.double() @ wide.T) <= TOLERANCE[dtype]
    back = pallas_kernels.quantized_input_grad(jax_array(grad), *in_bytes(weight), columns=columns, **settings)
    assert relative_rms_error(torch_tensor(back), grad.double() @ wide) <= TOLERANCE[dtype]


@pytest.mark.parametrize("format", ["fp8_e4m3fn", "fp8_e5m2"])
def test_every_pattern_of_fp8(format: str) -> None:
    import jax.numpy as jnp

    from easytorch.kernels.quantized_matmul import pallas_kernels

    data = torch.arange(256, dtype=torch.uint8)
    codes = jnp.arange(256, dtype=jnp.uint8).astype(jnp.int8).astype(jnp.int32)
    got = torch_tensor(pallas_kernels._numbers(format, codes, 0.0))
    torch.testing.assert_close(got, data.view(FORMATS[format].dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_tpu(kind: str) -> None:
    from easytorch.kernels.quantized_matmul import pallas_or_jax

    weight = made(kind, 24, (36, 61))
    x, bias, grad = torch.randn(5, 61), torch.randn(36), torch.randn(5, 36)
    zero = None if weight.zero is None else jax_array(weight.zero)
    arrays = (jax_array(x), jax_array(bias), jax_array(weight.data), jax_array(weight.scale), zero)
    settings = {"format": weight.format, "group_size": weight.group_size}
    (output,) = pallas_or_jax.forward(*arrays, **settings)
    x_grad, bias_grad, *rest = pallas_or_jax.backward(*arrays, output, jax_array(grad), **settings)
    wide = weight.dequantize(torch.float64)
    assert relative_rms_error(torch_tensor(output), x.double() @ wide.T + bias.double()) < 1e-5
    assert relative_rms_error(torch_tensor(x_grad), grad.double() @ wide) < 1e-5
    assert relative_rms_error(torch_tensor(bias_grad), grad.double().sum(0)) < 1e-5
    assert rest == [None] * 3


def test_groups_that_the_kernels_do_not_carry() -> None:
    from easytorch.kernels.quantized_matmul.pallas_kernels import carries

    assert carries("int8", 1, 61) and carries("int4", 3, 16) and carries("nf4", 4, 64) and carries("int8", 2, 384)
    assert not carries("int8", 3, 24) and not carries("int4", 3, 8) and not carries("int4", 3, 33)
