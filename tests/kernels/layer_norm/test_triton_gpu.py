"""The Triton norms against their definitions in float64: outputs and every gradient, on a GPU.

Under TRITON_INTERPRET=1 the same cases run on the CPU; test_triton.py does that in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import easytorch.kernels.layer_norm.native as layer_native
import easytorch.kernels.rms_norm.native as rms_native
from easytorch.kernels.layer_norm.triton_op import layer_norm
from easytorch.kernels.rms_norm.triton_op import rms_norm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
SHAPES = [(63, 60), (2, 5, 3), (3, 1000), (130, 16), (0, 8), (1, 4096)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.usefixtures("poisoned_empty"),
]
Check = Callable[..., None]


def rand(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE) * scale + shift


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, assert_matches: Check) -> None:
    arguments = {"x": rand(*shape, scale=3.0), "weight": rand(shape[-1])}
    assert_matches(rms_norm, rms_native.rms_norm, arguments, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype, assert_matches: Check) -> None:
    # a mean far from zero: a variance taken as E[x^2] - E[x]^2 would be lost
    arguments: dict[str, Any] = {"x": rand(*shape, shift=5.0), "weight": rand(shape[-1]), "bias": rand(shape[-1])}
    assert_matches(layer_norm, layer_native.layer_norm, {**arguments, "eps": 1e-3}, dtype)


@pytest.mark.parametrize("present", [(), ("weight",), ("bias",)], ids=str)
def test_what_is_absent(present: tuple[str, ...], assert_matches: Check) -> None:
    arguments = {"x": rand(7, 60), **{name: rand(60) for name in present}}
    assert_matches(layer_norm, layer_native.layer_norm, arguments, torch.float32)
    if "bias" not in present:
        assert_matches(rms_norm, rms_native.rms_norm, {**arguments, "eps": 0.5}, torch.float32)


def test_strides_and_a_gradient_of_stride_zero() -> None:
    packed = rand(6, 3, 40)
    for x in (packed[:, 1, 5:35], packed[:, :, ::2], packed.transpose(0, 1), packed.transpose(1, 2)):
        torch.testing.assert_close(rms_norm(x), rms_native.rms_norm(x))
        leaf, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
        layer_norm(leaf, rand(1).expand(x.shape[-1])).square().sum().backward()
        assert leaf.grad is not None and leaf.grad.shape == x.shape
        got = torch.autograd.grad(layer_norm(leaf, torch.arange(x.shape[-1], device=DEVICE).float()).sum(), leaf)[0]
        weight = torch.arange(x.shape[-1], device=DEVICE).double()
        want = torch.autograd.grad(layer_native.layer_norm(wide, weight).sum(), wide)[0]
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_a_wider_weight() -> None:
    x, weight = rand(5, 32).half(), rand(32)
    assert rms_norm(x, weight).dtype == torch.float32
    torch.testing.assert_close(rms_norm(x, weight), rms_native.rms_norm(x, weight))
    assert layer_norm(x, weight, weight).dtype == torch.float16
    torch.testing.assert_close(layer_norm(x, weight, weight), layer_native.layer_norm(x, weight, weight))


def test_only_the_gradients_asked_for() -> None:
    x, weight = rand(3, 16), rand(16).requires_grad_()
    layer_norm(x, weight, weight.detach()).sum().backward()
    rms_norm(x.requires_grad_(), weight.detach()).sum().backward()
    assert weight.grad is not None and x.grad is not None


def test_compiles_to_one_graph_and_passes_opcheck() -> None:
    x, weight, bias = rand(5, 24).requires_grad_(), rand(24).requires_grad_(), rand(24).requires_grad_()

    def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return 2 * rms_norm(layer_norm(x, weight, bias), weight)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(x, weight, bias)
    expected = step(x, weight, bias)
    torch.testing.assert_close(compiled, expected)
    got = torch.autograd.grad(compiled.square().sum(), (x, weight, bias))
    torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), (x, weight, bias)))
    torch.library.opcheck(torch.ops.easytorch.triton_rms_norm.default, (x, weight, 1e-6))
    torch.library.opcheck(torch.ops.easytorch.triton_rms_norm.default, (x, None, 1e-6))
    torch.library.opcheck(torch.ops.easytorch.triton_layer_norm.default, (x, weight, bias, 1e-6))
    torch.library.opcheck(torch.ops.easytorch.triton_layer_norm.default, (x, None, bias, 1e-6))


@pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [128, 4096, 5120, 16384])
def test_model_widths(width: int, dtype: torch.dtype, assert_matches: Check) -> None:
    arguments = {"x": rand(2000, width), "weight": rand(width)}
    assert_matches(rms_norm, rms_native.rms_norm, arguments, dtype)
    assert_matches(layer_norm, layer_native.layer_norm, {**arguments, "bias": rand(width)}, dtype)
