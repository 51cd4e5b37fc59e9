"""The gated network in parts of few tokens."""

from __future__ import annotations

import pytest
import torch

from easytorch.layers import mlp
from easytorch.layers.mlp import GatedMLP


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> GatedMLP:
    monkeypatch.setattr(mlp, "FRESH", 2**18)  # the outputs of gate and up: 256 bytes a token and more
    monkeypatch.setattr(mlp, "LEAST_ROWS", 16)
    torch.manual_seed(0)
    return GatedMLP(64, 512, "silu")


def test_parts_give_what_one_call_gives(layer: GatedMLP) -> None:
    x = torch.randn(3, 25, 64)
    shapes: list[torch.Size] = []
    network = layer._network

    def counted(part: torch.Tensor) -> torch.Tensor:
        shapes.append(part.shape)
        return network(part)

    layer._network = counted  # type: ignore[method-assign]
    with torch.no_grad():
        expected = network(x)
        for given in (x, x.mT.contiguous().mT, x.reshape(75, 64)):
            got = layer(given)
            torch.testing.assert_close(got, expected.view(got.shape))
        assert shapes == [(32, 64), (32, 64), (11, 64)] * 3
        shapes.clear()
        assert layer(x[:, :20]).shape == (3, 20, 64)  # too few
        assert layer(x[:0]).shape == (0, 25, 64)
    layer(x).sum().backward()  # autograd keeps the outputs in any case
    assert shapes == [(3, 20, 64), (0, 25, 64), (3, 25, 64)]


def test_a_hook_is_called_once(layer: GatedMLP) -> None:
    x = torch.randn(3, 25, 64)
    for module in (layer.gate_proj, layer.down_proj, layer.act_fn):
        calls: list[int] = []
        handle = module.register_forward_hook(lambda *given, calls=calls: calls.append(1))
        with torch.no_grad():
            layer(x)
        assert calls == [1]
        handle.remove()
