"""A quantized layer's codes are interleaved by products of few rows, and nothing else that a layer is for sees it."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from easytorch.distributed.sharding import _broadcast
from easytorch.kernels.cpu import library, processor
from easytorch.kernels.quantized_matmul.interleaved import interleave
from easytorch.layers.quantized import QuantizedLinear
from easytorch.layers.quantized_formats import FormatSettings
from easytorch.protocol.display import get_module_repr, prettify_nnx

pytestmark = pytest.mark.skipif(
    library.missing() is not None or not processor.BYTE_DOT_PRODUCTS,
    reason=f"no products of interleaved codes: {library.missing() or 'this CPU has no dot products of bytes'}",
)
FORMATS = (FormatSettings("int8", None), FormatSettings("affine", 32, 4), FormatSettings("affine", 64, 8))


def layer(settings: FormatSettings, outputs: int = 48) -> QuantizedLinear:
    torch.manual_seed(0)
    return QuantizedLinear.of(nn.Linear(128, outputs), settings)


def rows_of_x(rows: int) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 128).view(rows, 128)


def decode(one: Any, rows: int = 1) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = one(rows_of_x(rows))
    return found


def is_interleaved(one: QuantizedLinear) -> bool:
    return one.weight_codes.shape[0] != one.out_features


@pytest.mark.parametrize("settings", FORMATS, ids=str)
def test_a_product_of_few_rows_lays_the_codes_out(settings: FormatSettings) -> None:
    one = layer(settings)
    codes, weight = one.weight_codes.clone(), one.weight
    expected = nn.functional.linear(rows_of_x(20), weight, one.bias)
    before = one.quantized.nbytes
    plain = nn.functional.linear(rows_of_x(4), weight, one.bias)
    torch.testing.assert_close(decode(one, 4), plain, rtol=1e-4, atol=1e-4)
    assert is_interleaved(one) and one.quantized.nbytes == before
    assert torch.equal(one.weight_codes, interleave(codes, settings.storage))
    assert torch.equal(one.weight, weight) and torch.equal(one.decoded().weight, weight)
    torch.testing.assert_close(decode(one, 20), expected, rtol=1e-4, atol=1e-4)
    many = rows_of_x(3000)
    assert one.weight_codes.shape[0] == 3, "ATen takes so many rows"
    torch.testing.assert_close(decode(one, 3000), nn.functional.linear(many, weight, one.bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", FORMATS, ids=str)
def test_a_state_dict_has_rows_one_after_another(settings: FormatSettings) -> None:
    one = layer(settings)
    codes = one.weight_codes.clone()
    expected = decode(one)
    assert is_interleaved(one)
    state = one.state_dict()
    assert torch.equal(state["weight_codes"], codes)
    assert state["weight_codes"].data_ptr() == one.weight_codes.data_ptr(), "a state dict is the module's own tensors"
    assert torch.equal(decode(one), expected) and is_interleaved(one)
    # loaded where codes are interleaved
    other = layer(settings)
    with torch.no_grad():
        decode(other)
        changed = {name: tensor.clone() for name, tensor in state.items()}
        changed["bias"] += 1
    other.load_state_dict(changed)
    torch.testing.assert_close(decode(other), expected + 1)
    for again in (copy.deepcopy(one), pickled(one)):
        assert torch.equal(decode(again), expected) and torch.equal(again.state_dict()["weight_codes"], codes)


def pickled(one: QuantizedLinear) -> Any:
    file = io.BytesIO()
    torch.save(one, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def test_moving_training_and_compiling() -> None:
    one = layer(FORMATS[2])
    codes = one.weight_codes.clone()
    decode(one)
    assert torch.equal(one.to(torch.bfloat16).weight_codes, codes)
    expected = decode(one.float())
    one.float()
    with torch.inference_mode():
        one(torch.ones(1, 128))
    assert is_interleaved(one) and not one.weight_codes.is_inference()
    x = torch.ones(2, 128, requires_grad=True)
    one(x).sum().backward()
    torch.testing.assert_close(x.grad, one.weight.sum(0).expand(2, -1), rtol=1e-4, atol=1e-4)
    compiled = torch.compile(one, backend="eager", fullgraph=True)
    torch.testing.assert_close(decode(compiled), expected)
    assert one.to("meta").weight_codes.shape == codes.shape


def test_codes_that_stay_as_they_are() -> None:
    """Other numbers of rows, memory that processes share, and layers with hooks, whose weights may come and go."""
    odd, shared, hooked = layer(FORMATS[0], 50), layer(FORMATS[0]), layer(FORMATS[0])
    shared.share_memory()
    hooked.register_forward_pre_hook(lambda module, args: None)
    for one in (odd, shared, hooked):
        decode(one)
        assert not is_interleaved(one)
    x = torch.ones(1, 128)
    compiled = torch.compile(layer(FORMATS[0]), backend="eager")
    with torch.no_grad():
        compiled(x)
    assert not is_interleaved(compiled._orig_mod)


def test_what_sends_or_shows_the_codes_has_them_as_they_are_saved() -> None:
    """Ranks are sent rank 0's bytes, whatever they have computed before."""
    one = layer(FORMATS[1])
    shown = get_module_repr(one)
    assert "weight_codes: uint8 (48, 64)" in shown
    decode(one)
    assert is_interleaved(one)
    _broadcast(one, SimpleNamespace(ndim=0))
    assert not is_interleaved(one)
    decode(one)
    assert get_module_repr(one) == shown
    decode(one)
    assert "weight_codes: uint8 (48, 64)" in prettify_nnx(one)
