"""OperationOutput: dict, JSON, replace, pytree."""

from __future__ import annotations

import pytest
import torch

from easytorch.operations import AttentionOutput

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_json_is_bit_exact(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    back = AttentionOutput.from_json(AttentionOutput(attention_outputs=tensor, cache_view={"length": 3}).to_json())
    assert back.attention_outputs.dtype == dtype
    assert torch.equal(back.attention_outputs, tensor)
    assert back.attention_weights is None
    assert back.cache_view == {"length": 3}


def test_json_keeps_nan_and_strided_tensors() -> None:
    tensor = torch.tensor([[1.0, float("nan")], [float("-inf"), -0.0]]).T
    back = AttentionOutput.from_json(AttentionOutput(attention_outputs=tensor).to_json(indent=1))
    assert torch.equal(back.attention_outputs.view(torch.int32), tensor.contiguous().view(torch.int32))


def test_dict_and_replace() -> None:
    output = AttentionOutput(attention_outputs=torch.ones(2))
    assert set(output.to_dict()) == {"attention_outputs", "attention_weights", "cache_view"}
    assert AttentionOutput.from_dict(output.to_dict()).attention_outputs is output.attention_outputs
    assert output.replace(cache_view=1).cache_view == 1
    with pytest.raises(ValueError, match="has no field weights; it has attention_outputs"):
        AttentionOutput.from_dict({"weights": None})


def test_what_is_not_plain_cannot_be_json() -> None:
    with pytest.raises(TypeError, match="cannot write a object as JSON"):
        AttentionOutput(cache_view=object()).to_json()
