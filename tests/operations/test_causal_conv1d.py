"""causal_conv1d against torch's convolution and transformers' update, and its own errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from easytorch.operations import OperationMetadata, OperationRegistry

FORCED = [None, "native"]


def causal_conv1d(backend: str | None = None):
    return OperationRegistry.create("causal_conv1d", OperationMetadata(backend=backend))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("forced", FORCED)
def test_is_the_padded_depthwise_convolution(forced: str | None, activation: str | None, width: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 9, 12), torch.randn(12, width), torch.randn(12)
    convolved = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=width - 1, groups=12)[..., :9]
    expected = (convolved if activation is None else F.silu(convolved)).transpose(1, 2)
    result = causal_conv1d(forced)(x, weight, bias, activation=activation)
    torch.testing.assert_close(result.outputs, expected)
    assert torch.equal(result.final_state, x.transpose(1, 2)[..., 10 - width :])


@pytest.mark.parametrize("forced", FORCED)
def test_a_step_is_the_update_of_transformers(forced: str | None) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    torch.manual_seed(0)
    x, weight, bias, state = torch.randn(2, 1, 12), torch.randn(12, 4), torch.randn(12), torch.randn(2, 12, 4)
    result = causal_conv1d(forced)(x, weight, bias, state[..., 1:], "silu")
    expected = modeling.causal_conv1d_update(x.transpose(1, 2), state, weight, bias, "silu")
    torch.testing.assert_close(result.outputs, expected.transpose(1, 2))
    torch.testing.assert_close(result.final_state, state[..., 1:])


def test_long_sequences_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from easytorch.kernels.causal_conv1d import aten

    x, weight, ids = torch.randn(2, 50, 6), torch.randn(6, 4), torch.arange(50).expand(2, 50) // 7
    whole = causal_conv1d()(x, weight, segment_ids=ids).outputs
    monkeypatch.setattr(aten, "BLOCK", 2 * 6 * 8)
    torch.testing.assert_close(causal_conv1d()(x, weight, segment_ids=ids).outputs, whole)


@pytest.mark.parametrize("forced", FORCED)
def test_the_state_of_one_tap_is_empty_and_is_taken_again(forced: str | None) -> None:
    run, x, weight = causal_conv1d(forced), torch.randn(2, 3, 6), torch.randn(6, 1)
    with torch.no_grad():
        first = run(x, weight)
        again = run(x, weight, initial_state=first.final_state)
    assert first.final_state.shape == (2, 6, 0) and torch.equal(first.outputs, again.outputs)


@pytest.mark.parametrize("forced", FORCED)
def test_errors(forced: str | None) -> None:
    run, x = causal_conv1d(forced), torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match=r"weight must be \(8, W\), got \(4, 3\)"):
        run(x, torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"bias must be \(8,\), got \(3,\)"):
        run(x, torch.ones(8, 3), torch.ones(3))
    with pytest.raises(ValueError, match="'silu' or 'swish', got 'gelu'"):
        run(x, torch.ones(8, 3), activation="gelu")
