"""The Triton gated linear units against their definitions in float64: outputs and gradients, on a GPU.

Under TRITON_INTERPRET=1 the same cases run on the CPU; test_triton.py does that in a process of its own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import pytest
import torch

from easytorch.kernels.glu import native, triton_op

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
UNITS = {
    "swiglu": (triton_op.swiglu, native.swiglu),
    "geglu": (triton_op.geglu, native.geglu),
    "geglu_tanh": tuple(functools.partial(geglu, approximate="tanh") for geglu in (triton_op.geglu, native.geglu)),
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.usefixtures("poisoned_empty"),
]
Check = Callable[..., None]


def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE) * scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(63, 60), (2, 3, 2100), (5,), (0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("unit", UNITS)
def test_units(unit: str, shape: tuple[int, ...], dtype: torch.dtype, assert_matches: Check) -> None:
    torch.manual_seed(0)
    # far out the activation is the identity, or zero: the formulas must neither overflow nor cancel there
    assert_matches(*UNITS[unit], {"gate": rand(*shape, scale=4.0), "up": rand(*shape)}, dtype)


@pytest.mark.parametrize("unit", UNITS)
def test_strides_and_a_gradient_of_stride_zero(unit: str) -> None:
    torch.manual_seed(0)
    function, definition = UNITS[unit]
    packed = rand(6, 3, 80)
    for gate, up in (packed.chunk(2, -1), (packed[..., ::2], packed[..., 1::2]), packed.transpose(0, 1).chunk(2, -1)):
        leaves = [x.detach().requires_grad_() for x in (gate, up)]
        wide = [x.detach().double().requires_grad_() for x in (gate, up)]
        got, want = function(*leaves), definition(*wide)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
        for a, b in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), wide), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_the_extremes() -> None:
    gate = torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4], device=DEVICE)
    for function, definition in UNITS.values():
        torch.testing.assert_close(function(gate, torch.ones_like(gate)), definition(gate, torch.ones_like(gate)))


def test_compiles_to_one_graph_and_passes_opcheck() -> None:
    gate, up = rand(5, 24).requires_grad_(), rand(5, 24).requires_grad_()

    def step(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return 2 * triton_op.swiglu(gate, triton_op.geglu(gate, up, "tanh"))

    compiled, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(gate, up), step(gate, up)
    torch.testing.assert_close(compiled, expected)
    got = torch.autograd.grad(compiled.square().sum(), (gate, up))
    torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), (gate, up)))
    torch.library.opcheck(torch.ops.easytorch.triton_glu.default, (gate, up, "silu"))
    torch.library.opcheck(torch.ops.easytorch.triton_glu.default, (gate, up.detach(), "gelu"))


@pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unit", UNITS)
def test_model_widths(unit: str, dtype: torch.dtype, assert_matches: Check) -> None:
    assert_matches(*UNITS[unit], {"gate": rand(2000, 14336), "up": rand(2000, 14336)}, dtype)
