"""`linear` as autograd records it in training: outputs and gradients of float64, in float32 and under autocast."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from easytorch.kernels.linear import products, recorded

ROWS, WIDTH, SIZES = 70, 320, (300, 130)  # two layers of one input; enough for oneDNN


def given(biased: bool) -> tuple[torch.Tensor, list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    x = torch.randn(2, ROWS // 2, WIDTH).requires_grad_()
    joint, bias = torch.randn(sum(SIZES), WIDTH), torch.randn(sum(SIZES))
    weights = [torch.nn.Parameter(one) for one in joint.split(SIZES)]
    return x, weights, [torch.nn.Parameter(one) for one in bias.split(SIZES)] if biased else []


def call(x: torch.Tensor, weights: list[torch.nn.Parameter], biases: list[torch.nn.Parameter]) -> torch.Tensor:
    assert recorded.prefers(x, weights)
    return recorded.linear(x, weights, biases)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_gradients_are_those_of_float64(
    dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_ONEDNN", torch.backends.mkldnn.is_available())  # whatever this CPU prefers
    x, weights, biases = given(biased)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        output = call(x, weights, biases)
    assert output.dtype is dtype
    upstream = torch.randn(output.shape).to(dtype)
    leaves = [x, *weights, *biases]
    grads = torch.autograd.grad(output, leaves, upstream)
    wide = [one.detach().double().requires_grad_() for one in leaves]
    expected = F.linear(wide[0], torch.cat(wide[1:3]), torch.cat(wide[3:]) if biased else None)
    wanted = torch.autograd.grad(expected, wide, upstream.double())
    bound = 1e-5 if dtype is torch.float32 else 8e-3
    for found, want in zip((output, *grads), (expected, *wanted), strict=True):
        assert (found.detach().double() - want).norm() <= bound * want.norm()
    assert all(grad.dtype is torch.float32 for grad in grads)


def test_gradients_of_gradients_and_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_ONEDNN", torch.backends.mkldnn.is_available())
    x, weights, biases = given(True)

    def second(output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(output.sin().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), (x, *weights))

    found = second(call(x, weights, biases))
    expected = second(F.linear(x, torch.cat(weights), torch.cat(biases)))
    for one, want in zip(found, expected, strict=True):
        assert (one - want).norm() <= 1e-4 * want.norm()
    weights[1].requires_grad_(False)
    call(x, weights, biases).sum().backward()
    assert weights[1].grad is None and weights[0].grad is not None and biases[1].grad is not None


def test_outputs_may_be_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Longformer scales its queries: autograd refuses that of a view that an `autograd.Function` returned."""
    monkeypatch.setattr(products, "_ONEDNN", torch.backends.mkldnn.is_available())
    x, weights, biases = given(True)
    for rows in (x, x.flatten(0, 1)):
        outputs = call(rows, weights, biases), F.linear(rows, torch.cat(weights), torch.cat(biases))
        found, wanted = (torch.autograd.grad(one.div_(3.0).sin().sum(), (x, *weights, *biases)) for one in outputs)
        for one, want in zip(found, wanted, strict=True):
            assert (one - want).norm() <= 1e-5 * want.norm()


def test_small_and_traced_calls_are_left_to_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_ONEDNN", True)
    x, weights, _ = given(False)
    assert recorded.prefers(x, weights)
    assert recorded.takes(x) and not recorded.takes(x[0, :3])
    assert not recorded.prefers(x[0, :3], weights), "few rows"
    assert not recorded.prefers(x, [weights[1]]), "a small weight"
    assert not recorded.prefers(x.double(), weights)
    with torch.no_grad():
        assert not recorded.prefers(x, weights)
    assert torch.func.vmap(lambda one: torch.tensor(recorded.prefers(one, weights)))(x).sum() == 0


def test_what_is_kept_for_the_gradients_is_the_input_and_each_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that keep them elsewhere, as `save_on_cpu`, give back weights that are no longer side by side."""
    monkeypatch.setattr(products, "_ONEDNN", torch.backends.mkldnn.is_available())
    x, weights, biases = given(True)
    expected = torch.autograd.grad(call(x, weights, biases).sin().sum(), (x, *weights, *biases))
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.clone())
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = call(x, weights, biases)
    assert sum(one.numel() for one in kept) == x.numel() + sum(one.numel() for one in weights)
    found = torch.autograd.grad(output.sin().sum(), (x, *weights, *biases))
    for one, want in zip(found, expected, strict=True):
        torch.testing.assert_close(one, want)


def test_gradients_of_weights_in_float32_are_not_onednns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_ONEDNN", torch.backends.mkldnn.is_available())
    x, weights, _ = given(biased=False)
    output, asked, product = call(x, weights, []), [], products._product
    monkeypatch.setattr(products, "_product", lambda a, b, *given: (asked.append(a.shape), product(a, b, *given))[1])
    torch.autograd.grad(output.sum(), (x, *weights))
    assert asked == [(ROWS, sum(SIZES))]  # of the input's gradient alone
