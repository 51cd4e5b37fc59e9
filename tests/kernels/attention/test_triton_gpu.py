"""The Triton kernels against the definition in float64: outputs and every gradient, on a GPU.

Under TRITON_INTERPRET=1 the same cases run on the CPU; test_triton_interpreter.py does that in a process of its own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.native import attention
from easytorch.kernels.attention.triton_flash import flash_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# relative RMS error from float64; the gradients of 16-bit inputs round P and dS once more than the output does
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
]

Tensors = dict[str, torch.Tensor]
Builder = Callable[..., dict[str, Any]]
CASES: dict[str, Builder] = {}


def case(build: Builder) -> Builder:
    CASES[build.__name__] = build
    return build


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def heads(b: int = 1, t: int = 63, s: int = 63, h: int = 2, k: int = 1, d: int = 60, dv: int | None = None) -> Tensors:
    return {"query": rand(b, t, h, d), "key": rand(b, s, k, d), "value": rand(b, s, k, dv or d)}


def chance(share: float, *shape: int) -> torch.Tensor:
    return torch.rand(shape, device=DEVICE) < share


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 3, shape, device=DEVICE)


@case
def plain() -> dict[str, Any]:
    return heads(h=6, k=2)


@case
def own_scale_and_value_dim() -> dict[str, Any]:
    return {**heads(d=16, dv=40), "softmax_scale": 0.7}


@case
def causal() -> dict[str, Any]:
    return {**heads(b=2), "causal": True}


@case
def causal_more_keys() -> dict[str, Any]:
    return {**heads(t=24), "causal": True}


@case
def causal_rows_before_the_first_key() -> dict[str, Any]:
    return {**heads(s=24), "causal": True}


@case
def one_query_of_one_key_head() -> dict[str, Any]:
    return {**heads(t=1, h=4, k=1), "causal": True}


@case
def window() -> dict[str, Any]:
    return {**heads(t=40), "sliding_window": (20, 5)}


@case
def window_and_causal() -> dict[str, Any]:
    return {**heads(), "sliding_window": 33, "causal": True}


@case
def window_open_to_the_left() -> dict[str, Any]:
    return {**heads(s=40), "sliding_window": (None, 3)}


@case
def softcap() -> dict[str, Any]:
    return {**heads(), "softcap": 1.5, "causal": True, "softmax_scale": 1.0}


@case
def softcap_far_above_the_scores() -> dict[str, Any]:
    return {**heads(t=20), "softcap": 1e4}


@case
def bias_of_every_score() -> dict[str, Any]:
    bias = rand(2, 2, 40, 50)
    bias[0, :, 3] = float("-inf")  # a row that sees nothing
    bias[1, :, :, 7] = float("-inf")
    return {**heads(b=2, t=40, s=50, k=2), "bias": bias}


@case
def bias_of_each_head() -> dict[str, Any]:
    # the blocks above the diagonal are not visited: the gradient of the bias is zero there all the same
    return {**heads(), "bias": rand(2, 1, 63), "causal": True}


@case
def mask_of_each_row() -> dict[str, Any]:
    mask = chance(0.5, 2, 1, 40, 63)
    mask[:, :, 11:14] = False
    return {**heads(b=2, t=40), "mask": mask}


@case
def mask_of_padding() -> dict[str, Any]:
    return {**heads(), "mask": (torch.arange(63, device=DEVICE) < 50).reshape(1, 1, 1, 63), "causal": True}


@case
def nothing_to_see() -> dict[str, Any]:
    return {**heads(), "mask": torch.zeros(1, dtype=torch.bool, device=DEVICE), "sinks": rand(2)}


@case
def segments() -> dict[str, Any]:
    return {**heads(b=2, t=40), "query_segment_ids": ids(2, 40), "key_segment_ids": ids(2, 63)}


@case
def sinks() -> dict[str, Any]:
    given = rand(4) * 3
    given[1] = float("-inf")  # a sink that takes nothing
    return {**heads(h=4, k=2, s=40), "sinks": given, "causal": True}


@case
def dropped() -> dict[str, Any]:
    return {**heads(b=2, h=4, k=2, t=20), "dropout_prob": 0.4, "seed": 2**32 + 17, "causal": True}


@case
def everything() -> dict[str, Any]:
    features = {
        "mask": chance(0.8, 1, 4, 40, 1), "bias": rand(1, 1, 40, 63), "causal": True, "sliding_window": (50, 50),
        "query_segment_ids": ids(1, 40), "key_segment_ids": ids(1, 63), "softcap": 4.0, "sinks": rand(4),
        "softmax_scale": 0.4, "dropout_prob": 0.2, "seed": torch.tensor(5),
    }  # fmt: skip
    return {**heads(t=40, h=4, k=2, dv=33), **features}


@case
def strides() -> dict[str, Any]:
    packed = rand(1, 63, 1, 180)
    value = rand(1, 1, 60, 63).permute(0, 3, 1, 2)  # the head_dim is not the innermost
    mask = chance(0.7, 63, 63).T
    query = rand(1, 2, 63, 60).transpose(1, 2)
    given = {"query": query, "key": packed[..., 60:120], "value": value, "mask": mask, "causal": True}
    return {**given, "sinks": rand(2, 3)[:, 1]}


@case
def one_sink_for_all() -> dict[str, Any]:
    return {**heads(h=4, k=2, t=20), "sinks": rand(1).expand(4)}


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten shows as NaN."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return filled

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


def results(function: Callable[..., Any], arguments: dict[str, Any], dtype: torch.dtype) -> Tensors:
    """The output and the gradients of every floating tensor, computed in `dtype`."""
    leaves = {
        name: tensor.to(dtype).requires_grad_()
        for name, tensor in arguments.items()
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    }
    output = function(**{**arguments, **leaves})
    output = output[0] if isinstance(output, tuple) else output
    weight = torch.linspace(-1, 1, output.numel(), device=DEVICE).sin().reshape(output.shape)
    grads = torch.autograd.grad((output * weight.to(dtype)).sum(), list(leaves.values()))
    return {"output": output.detach(), **{f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}}


def rounded(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments as they are in `dtype`: what both sides are given."""
    floating = {n: a for n, a in arguments.items() if isinstance(a, torch.Tensor) and a.is_floating_point()}
    return {**arguments, **{name: tensor.to(dtype).float() for name, tensor in floating.items()}}


def assert_same(got: Tensors, expected: Tensors, tolerance: float) -> None:
    for name, want in expected.items():
        assert got[name].shape == want.shape
        if want.numel() == 0:
            continue
        assert got[name].isfinite().all(), f"{name} is not finite"
        difference = (got[name].double() - want).square().mean().sqrt()
        scale = want.square().mean().sqrt()
        assert difference <= tolerance * scale, f"{name}: relative RMS error {float(difference / scale):.2e}"


def check(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    arguments = rounded(arguments, dtype)
    expected = results(attention, arguments, torch.float64)
    got = results(flash_attention, arguments, dtype)
    assert all(tensor.dtype == dtype for tensor in got.values())
    assert_same(got, expected, TOLERANCE[dtype])


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("level", [LOWEST, 1e30])
def test_a_bias_as_large_throughout_a_row(level: float) -> None:
    torch.manual_seed(0)
    bias = torch.where(torch.arange(20, device=DEVICE)[:, None] % 3 == 0, level, rand(1, 1, 20, 40))
    extra = {} if level == LOWEST else {"sinks": torch.tensor([0.5, level], device=DEVICE)}
    check({**heads(t=20, s=40, d=16), "bias": bias, **extra}, torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_float32(name: str) -> None:
    torch.manual_seed(0)
    check(CASES[name](), torch.float32)


# the interpreter takes seconds a case: of 16 bits it runs those that round differently
@pytest.mark.parametrize("name", ["causal", "everything", "strides"] if INTERPRETED else CASES)
def test_float16(name: str) -> None:
    torch.manual_seed(0)
    check(CASES[name](), torch.float16)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter truncates float32 to bfloat16 where a device rounds")
@pytest.mark.parametrize("name", CASES)
def test_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    check(CASES[name](), torch.bfloat16)


@pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_head_dims_over_many_blocks(dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check({**heads(b=2, t=700, s=1000, h=4, d=dim), "causal": True}, dtype)
    check({**heads(b=1, t=700, s=1000, h=4, d=dim), "sliding_window": (300, 100)}, dtype)


@pytest.mark.parametrize("shape", [{"s": 0}, {"t": 0}, {"b": 0}], ids=str)
def test_empty(shape: dict[str, int]) -> None:
    check({**heads(**{"t": 3, "s": 3, "h": 2, **shape}), "causal": True}, torch.float32)


def test_a_gradient_of_stride_zero() -> None:
    leaf = {name: tensor.requires_grad_() for name, tensor in heads(t=5, s=7, h=2).items()}
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in leaf.items()}
    grads = torch.autograd.grad(flash_attention(**leaf).sum(), list(leaf.values()))
    expected = torch.autograd.grad(attention(**exact)[0].sum(), list(exact.values()))
    # the true gradients of query and key vanish: what is left is the rounding of a sum of terms near one
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_dropout_without_a_seed_follows_the_generator_of_torch() -> None:
    arguments = heads(t=9, s=9, h=2)
    torch.manual_seed(1)
    first, second = (flash_attention(**arguments, dropout_prob=0.5) for _ in range(2))
    torch.manual_seed(1)
    again = flash_attention(**arguments, dropout_prob=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_compiles_to_one_graph() -> None:
    torch.manual_seed(0)
    arguments = {**heads(t=9, s=9, h=2), "causal": True, "bias": rand(1, 2, 9, 9), "dropout_prob": 0.3, "seed": 3}

    def step(**call: Any) -> torch.Tensor:
        return 2 * flash_attention(**call)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, arguments, torch.float32), results(step, arguments, torch.float32), 1e-6)


def test_opcheck() -> None:
    call = heads(t=5, s=6, h=2, d=8)
    tensors = [tensor.requires_grad_() for tensor in call.values()]
    bias, sink = rand(1, 2, 1, 6).requires_grad_(), rand(2).requires_grad_()
    mask, seed = chance(0.8, 1, 1, 5, 6), torch.tensor(3, device=DEVICE)
    forward = torch.ops.easytorch.triton_flash_forward.default
    torch.library.opcheck(forward, (*tensors, *AttentionCall(scale=0.3, right=0)))
    torch.library.opcheck(forward, (*tensors, mask, bias, ids(1, 5), ids(1, 6), sink, seed, 0.3, 3, 0, 2.0, 0.2))


@pytest.mark.skipif(INTERPRETED, reason="8 GiB of tensors")
def test_offsets_beyond_31_bits() -> None:
    """The last rows of a query of 2**31 elements and more, against a call on those rows alone."""
    torch.manual_seed(0)
    length, tail = 2**17 + 300, 256
    query = torch.randn(1, length, 128, 128, device=DEVICE, dtype=torch.bfloat16)
    key, value = (torch.randn(1, length, 1, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    whole = flash_attention(query, key, value, sliding_window=64, causal=True)
    part = flash_attention(query[:, -tail:], key[:, -2 * tail :], value[:, -2 * tail :], sliding_window=64, causal=True)
    torch.testing.assert_close(whole[:, -tail:], part)
