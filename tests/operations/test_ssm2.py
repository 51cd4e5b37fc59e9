"""ssm2 against transformers' scan of Mamba-2."""

from __future__ import annotations

import pytest
import torch

from easytorch.operations import OperationMetadata, OperationRegistry


def ssm2(backend: str | None = None):
    return OperationRegistry.create("ssm2", OperationMetadata(backend=backend))


@pytest.mark.parametrize("forced", [None, "native"])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_is_the_scan_of_transformers(forced: str | None, groups: int) -> None:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    torch.manual_seed(0)
    x, dt, A = torch.randn(2, 63, 6, 10), torch.randn(2, 63, 6), -torch.rand(6) * 4
    B, C, D = torch.randn(2, 63, groups, 7), torch.randn(2, 63, groups, 7), torch.randn(6)
    bias, limit, state = torch.randn(6), (0.1, 1.5), torch.randn(2, 6, 10, 7)
    outputs, last = modeling.mamba2_chunk_scan(
        x, dt, A, B, C, 16, D, bias, initial_states=state, dt_softplus=True, dt_limit=limit, return_final_states=True
    )
    result = ssm2(forced)(x, dt, A, B, C, D, None, bias, True, limit, state)
    torch.testing.assert_close(result.outputs, outputs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.final_state, last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("forced", [None, "native"])
def test_a_step_is_the_update_of_transformers(forced: str | None) -> None:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    torch.manual_seed(0)
    x, dt, A, D, z = torch.randn(2, 6, 10), torch.randn(2, 6), -torch.rand(6), torch.randn(6), torch.randn(2, 6, 10)
    B, C, state, bias = torch.randn(2, 2, 7), torch.randn(2, 2, 7), torch.randn(2, 6, 10, 7), torch.randn(6)
    step = (tensor.unsqueeze(1) for tensor in (x, dt))
    result = ssm2(forced)(*step, A, B.unsqueeze(1), C.unsqueeze(1), D, z.unsqueeze(1), bias, True, initial_state=state)
    # transformers' wants what is one a head for each of its channels
    wide = [tensor.unsqueeze(-1).expand(*tensor.shape, 10) for tensor in (dt, D, bias)]
    decay = A[:, None, None].expand(6, 10, 7)
    expected = modeling.mamba2_selective_state_update(
        state, x, wide[0], decay, B, C, wide[1], z=z, dt_bias=wide[2], dt_softplus=True
    )
    torch.testing.assert_close(result.outputs.squeeze(1), expected)
    torch.testing.assert_close(result.final_state, state)


@pytest.mark.parametrize("length", [64, 128, 256])
def test_every_length_of_chunk(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from easytorch.kernels.ssm2 import aten

    torch.manual_seed(0)
    x, dt, A, B = torch.randn(1, 300, 2, 5), torch.rand(1, 300, 2), -torch.rand(2), torch.randn(1, 300, 1, 4)
    monkeypatch.setattr(aten, "SCORES", 2 * length**2)
    ids = (torch.arange(300) // 31).unsqueeze(0)
    got, want = (ssm2(forced)(x, dt, A, B, B, segment_ids=ids) for forced in (None, "native"))
    torch.testing.assert_close(got.outputs, want.outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("forced", [None, "native"])
def test_errors(forced: str | None) -> None:
    x, dt, A, B = torch.randn(2, 5, 6, 4), torch.ones(2, 5, 6), torch.ones(6), torch.ones(2, 5, 2, 3)
    with pytest.raises(ValueError, match="G a divisor of 6"):
        ssm2(forced)(x, dt, A, torch.ones(2, 5, 4, 3), B)
    with pytest.raises(ValueError, match=r"A must be \(6,\), got \(6, 4\)"):
        ssm2(forced)(x, dt, torch.ones(6, 4), B, B)
    with pytest.raises(ValueError, match=r"D must be \(6, 4\), got \(4, 6\)"):
        ssm2(forced)(x, dt, A, B, B, torch.ones(4, 6))
    with pytest.raises(ValueError, match="dt_limit"):
        ssm2(forced)(x, dt, A, B, B, dt_limit=(2.0, 1.0))
