"""The Triton rotary against its definition in float64: outputs and gradients, on a GPU.

Under TRITON_INTERPRET=1 the same cases run on the CPU; test_triton.py does that in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from easytorch.kernels.rotary import native, triton_op

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.usefixtures("poisoned_empty"),
]


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def angles_of(batch: int, length: int, rotated: int) -> Tensor:
    return (torch.rand(batch, length, rotated // 2, device=DEVICE) * 6).repeat(1, 1, 2)


def check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, **options: object) -> None:
    """q, k in their own strides, the tables as they are; the definition gets the same numbers in float64."""
    leaves = [t.to(dtype).detach().requires_grad_() for t in (q, k)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    got = triton_op.rotary(*leaves, cos, sin, **options)
    want = native.rotary(*wide, cos.double(), sin.double(), **options)
    upstream = [torch.randn_like(t) for t in got]
    grads = torch.autograd.grad(got, leaves, upstream)
    grads64 = torch.autograd.grad(want, wide, [t.double() for t in upstream])
    for a, b in zip((*got, *grads), (*want, *grads64), strict=True):
        assert a.shape == b.shape and a.dtype == dtype and a.isfinite().all()
        assert (a.double() - b).square().sum().sqrt() <= TOLERANCE[dtype] * b.square().sum().sqrt()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(
    ("shape", "kv_heads", "rotated", "batch"),
    [((2, 3, 6, 60), 2, 60, 1), ((2, 2, 6, 60), 2, 20, 2), ((1, 1, 3, 64), 3, 64, 1), ((1, 1, 70, 128), 1, 64, 1)],
    ids=str,
)
def test_outputs_and_gradients(
    shape: tuple[int, ...], kv_heads: int, rotated: int, batch: int, interleaved: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    angles = angles_of(batch, shape[1], rotated)
    q, k = rand(*shape), rand(*shape[:2], kv_heads, shape[3])
    check(q, k, angles.cos(), angles.sin(), dtype, interleaved=interleaved)


def test_strides_positions_and_tables_of_other_dtypes() -> None:
    torch.manual_seed(0)
    packed = rand(2, 2, 6, 32)  # one projection, and one with the heads before the tokens
    angles = angles_of(1, 9, 16)[0]
    ids = torch.tensor([[3, 1], [8, 2]], device=DEVICE)
    for q, k in (packed.split((4, 2), 2), (packed.transpose(1, 2).contiguous().transpose(1, 2), packed[:, :, ::3])):
        check(q, k, angles.cos(), angles.sin(), torch.float32, position_ids=ids)
        check(q, k, angles.cos().half(), angles.sin().half(), torch.float32, offset=2, interleaved=True)
    backwards = packed.flip(-1)[..., ::2]
    check(backwards, packed[..., 1::2], angles.cos(), angles.sin(), torch.float32)


def test_tables_whose_halves_differ() -> None:
    torch.manual_seed(0)
    cos, sin = rand(2, 2, 16), rand(2, 2, 16)
    check(rand(2, 2, 3, 24), rand(2, 2, 1, 24), cos, sin, torch.float32)


def test_float64_is_refused_wherever_it_is() -> None:
    given = [rand(1, 3, 2, 8), rand(1, 3, 2, 8), rand(3, 8), rand(3, 8)]
    for place, tensor in enumerate(given):
        wide = [*given[:place], tensor.double(), *given[place + 1 :]]
        assert "float64" in (triton_op.supports(*wide) or "")


def test_nothing_to_turn() -> None:
    angles = angles_of(1, 0, 16)
    query, key = triton_op.rotary(rand(2, 0, 3, 16), rand(2, 0, 1, 16), angles.cos(), angles.sin())
    assert query.shape == (2, 0, 3, 16) and key.shape == (2, 0, 1, 16)


def test_compiles_to_one_graph_and_passes_opcheck() -> None:
    angles = angles_of(1, 2, 16)
    inputs = (rand(1, 2, 4, 16).requires_grad_(), rand(1, 2, 2, 16).requires_grad_(), angles.cos(), angles.sin())

    def step(*inputs: Tensor) -> Tensor:
        return sum(x.square().sum() for x in triton_op.rotary(*inputs, interleaved=True))

    compiled, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs), step(*inputs)
    torch.testing.assert_close(compiled, expected)
    got, want = (torch.autograd.grad(x, inputs[:2]) for x in (compiled, expected))
    torch.testing.assert_close(got, want)
    torch.library.opcheck(torch.ops.easytorch.triton_rotary.default, (*inputs, False))


@pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_model_sizes(interleaved: bool, dtype: torch.dtype) -> None:
    angles = angles_of(1, 2000, 128)
    q, k = rand(2, 2000, 32, 128), rand(2, 2000, 8, 128)
    check(q, k, angles.cos(), angles.sin(), dtype, interleaved=interleaved)
