"""gated_delta_rule against both of transformers' forms of it."""

from __future__ import annotations

import pytest
import torch

from easytorch.operations import OperationMetadata, OperationRegistry


def gated_delta_rule(backend: str | None = None, scale: float | None = None):
    return OperationRegistry.create("gated_delta_rule", OperationMetadata(backend=backend, softmax_scale=scale))


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 130, 2, 12).unbind(0)
    value, g, beta = torch.randn(2, 130, 6, 10), -torch.rand(2, 130, 6), torch.rand(2, 130, 6)
    return [query, key, value, g, beta]


@pytest.mark.parametrize("function", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("forced", [None, "native"])
def test_is_the_rule_of_transformers(forced: str | None, function: str, tensors: list[torch.Tensor]) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    state = torch.randn(2, 6, 12, 10)
    outputs, last = getattr(modeling, function)(
        *tensors, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    result = gated_delta_rule(forced)(*tensors, initial_state=state, use_qk_l2norm=True)
    torch.testing.assert_close(result.outputs, outputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.final_state, last, rtol=1e-4, atol=1e-5)


def test_the_same_key_again_and_again() -> None:
    """The inverse by powers of the system, which overflow here, would be lost."""
    key = torch.ones(1, 130, 1, 8) / 8**0.5
    value, ones = torch.randn(1, 130, 1, 4), torch.ones(1, 130, 1)
    got, want = (gated_delta_rule(forced)(key, key, value, 0 * ones, ones) for forced in (None, "native"))
    torch.testing.assert_close(got.outputs, want.outputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(want.outputs, value / 8**0.5, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("forced", [None, "native"])
def test_the_scale_of_call_and_metadata(forced: str | None, tensors: list[torch.Tensor]) -> None:
    normal = {"use_qk_l2norm": True}
    default = gated_delta_rule(forced)(*tensors, **normal).outputs * 12**0.5
    torch.testing.assert_close(gated_delta_rule(forced, 0.5)(*tensors, **normal).outputs, 0.5 * default)
    torch.testing.assert_close(gated_delta_rule(forced, 0.5)(*tensors, scale=2.0, **normal).outputs, 2.0 * default)
    torch.testing.assert_close(gated_delta_rule(forced)(*tensors, 2.0, **normal).outputs, 2.0 * default)
    with pytest.raises(ValueError, match="two names"):
        gated_delta_rule(forced)(*tensors, softmax_scale=1.0, scale=1.0)


@pytest.mark.parametrize("forced", [None, "native"])
def test_errors(forced: str | None, tensors: list[torch.Tensor]) -> None:
    query, key, value, g, beta = tensors
    with pytest.raises(ValueError, match="multiple of 2 heads, got 5"):
        gated_delta_rule(forced)(query, key, value[:, :, :5], g, beta)
    with pytest.raises(ValueError, match=r"key must be \(2, 130, 2, 12\), got \(2, 130, 2, 11\)"):
        gated_delta_rule(forced)(query, key[..., :11], value, g, beta)
    with pytest.raises(ValueError, match=r"g must be \(2, 130, 6\), got \(2, 130, 2\)"):
        gated_delta_rule(forced)(query, key, value, g[..., :2], beta)
