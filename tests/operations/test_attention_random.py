"""Random shapes and features: whatever an attention does not refuse, it computes as the definition does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from easytorch.kernels.attention import native
from easytorch.operations import OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import relative_rms_error

IMPLEMENTATIONS = ("sdpa", "flash", "flash:native", "blocksparse", "decode", "ring", None)  # None: the automatic choice


@st.composite
def calls(draw: Any, length: int | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The differentiable tensors and the other arguments of an attention."""
    sizes = st.integers(1, 70)
    b, t, s = draw(st.integers(1, 2)), length or draw(sizes), draw(sizes)
    k, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    d, dv, h = draw(st.integers(1, 40)), draw(st.integers(1, 40)), k * group
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def broadcast(*shape: int) -> list[int]:
        return [size if draw(st.booleans()) else 1 for size in shape]

    tensors = {"query": randn(b, t, h, d), "key": randn(b, s, k, d), "value": randn(b, s, k, dv)}
    features: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        features["mask"] = torch.rand(broadcast(b, h, t, s), generator=generator) > 0.3
    if draw(st.booleans()):
        tensors["bias"] = randn(*broadcast(b, h, t, s))
    if draw(st.booleans()):
        tensors["sinks"] = randn(h)
    if draw(st.booleans()):
        sides = st.none() | st.integers(0, 50)
        features["sliding_window"] = draw(st.integers(1, 50) | st.tuples(sides, sides))
    if draw(st.booleans()):
        features["softcap"] = draw(st.floats(0.5, 50))
    if draw(st.booleans()):
        features["softmax_scale"] = draw(st.floats(0.05, 1))
    if draw(st.booleans()):
        for name, size in (("query_segment_ids", t), ("key_segment_ids", s)):
            features[name] = torch.randint(0, 3, (b, size), generator=generator).sort(-1).values
    if draw(st.booleans()):
        features |= {"dropout_prob": draw(st.floats(0.05, 0.9)), "seed": draw(st.integers(0, 2**40))}
    return tensors, features


def run(function: Any, tensors: dict[str, torch.Tensor], features: dict[str, Any], dtype: torch.dtype) -> list[Any]:
    leaves = {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}
    result = function(**leaves, **features)
    output = result[0] if isinstance(result, tuple) else result.attention_outputs
    weight = torch.linspace(-1, 1, output.numel(), dtype=dtype).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), list(leaves.values()))]


def assert_matches(implementation: str | None, tensors: dict[str, torch.Tensor], features: dict[str, Any]) -> None:
    attention = OperationRegistry.create("attention", OperationMetadata(backend=implementation))
    try:
        got = run(attention, tensors, features, torch.float32)
    except UnsupportedOperationError:
        assert implementation is not None, "the automatic choice carries every call"
        return
    expected = run(native.attention, tensors, features, torch.float64)
    for name, a, b in zip(("output", *tensors), got, expected, strict=True):
        assert a.isfinite().all(), name
        # a gradient can vanish by cancellation (one key, say): then what is left is rounding
        scale = max(float(b.square().mean().sqrt()), 0.1)
        error = float((a - b).square().mean().sqrt()) / scale
        assert error <= 2e-5, f"{implementation}, {name}: {error:.1e} of {scale:.1e}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(call=calls())
def test_random_calls(implementation: str | None, call: Any) -> None:
    assert_matches(implementation, *call)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(call=calls(length=1))
def test_random_decoding(call: Any) -> None:
    assert_matches("decode", *call)


def test_the_measure_sees_a_wrong_scale() -> None:
    tensors = {name: torch.randn(1, 9, 2, 8) for name in ("query", "key", "value")}
    got, expected = (run(native.attention, tensors, {"softmax_scale": x}, torch.float64)[0] for x in (0.3, 0.31))
    assert relative_rms_error(got, expected) > 1e-4
