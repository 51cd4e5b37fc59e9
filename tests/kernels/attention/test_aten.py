"""What kernels/attention/aten.py relies on in ATen's CPU kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from easytorch.kernels.attention import aten, contract, native
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lowered", ["boolean", "bias", "bias that needs a gradient"])
def test_a_row_that_sees_nothing_gives_zeros_and_finite_gradients(dtype: torch.dtype, lowered: str) -> None:
    q, k, v = (torch.randn(1, 40, h, 16, dtype=dtype, requires_grad=True) for h in (4, 2, 2))
    mask = torch.rand(1, 4, 40, 40) > 0.5
    mask[:, :, 7] = False
    bias = None if lowered == "boolean" else torch.randn(4, 40, 40, dtype=dtype)
    if bias is not None and lowered.endswith("gradient"):
        bias.requires_grad_()
    output = aten.attention(q, k, v, mask=mask, bias=bias)
    assert (output[:, 7] == 0).all()
    leaves = [q, k, v, *([bias] if bias is not None and bias.requires_grad else [])]
    assert all(g.isfinite().all() for g in torch.autograd.grad(output.sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [1, 2, 6, 15, 16, 17])
def test_a_query_of_nan_stays_nan(keys: int, causal: bool, dtype: torch.dtype) -> None:
    """Beside few keys ATen's maximum skips it, and its row would be zeros."""
    for length in {1, keys, 1 if causal else 20}:
        q, k, v = (torch.randn(1, rows, 2, 16, dtype=dtype) for rows in (length, keys, keys))
        q[0, -1, 0] = torch.nan
        wanted = torch.zeros(1, length, 2, 16, dtype=torch.bool)
        wanted[0, -1, 0] = True
        assert torch.equal(aten.attention(q, k, v, causal=causal).isnan(), wanted)


def test_a_float32_bias_is_not_rounded_to_the_inputs() -> None:
    q = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
    bias = torch.full((8, 8), 256.0) + torch.rand(8, 8)  # bfloat16 has steps of 2 here
    got = aten.attention(q, q, q, bias=bias).float()
    expected = aten.attention(*[q.float()] * 3, bias=bias)
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_a_direct_call_drops_nothing() -> None:
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(NotImplementedError, match="softcap"):
        aten.attention(q, q, q, softcap=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kept_band_serves_inference_training_and_transforms(dtype: torch.dtype) -> None:
    """The same small band in turn; one that was made in inference mode could not be saved for a gradient."""
    contract.kept_scores.cache_clear()
    q, k = torch.randn(2, 5, 4, 8, dtype=dtype), torch.randn(2, 9, 4, 8, dtype=dtype)
    for window in (3, (2, None), (-1, -1), (None, 1)):

        def attend(q: torch.Tensor, window: Any = window) -> torch.Tensor:
            return aten.attention(q, k, k, causal=True, sliding_window=window)

        expected = native.attention(q.double(), k.double(), k.double(), causal=True, sliding_window=window)[0]
        with torch.inference_mode():
            results = [attend(q)]
        leaf = q.clone().requires_grad_()
        results.append(attend(leaf))
        results[1].sum().backward()
        results.append(torch.func.vmap(attend)(q[None])[0])
        for result in results:
            assert relative_rms_error(result, expected) <= TOLERANCE[dtype]
    assert contract.kept_scores.cache_info().hits > 0
