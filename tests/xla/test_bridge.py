"""jax functions inside xla graphs: values, gradients, caching, and what is refused."""

from __future__ import annotations

import sys

import pytest
import torch

jax = pytest.importorskip("jax")
pytest.importorskip("torch_xla", reason="torch_xla has an environment of its own: scripts/test_xla.sh")

import jax.numpy as jnp  # noqa: E402
import torch_xla  # noqa: E402

from easytorch.kernels.interop.xla_bridge import call_jax, call_jax_with_gradient  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.uint8, torch.bool]


def softmax_attention(query, key, value, *, scale):
    """(T, D), (S, D), (S, D) -> output (T, D), weights (T, S)."""
    weights = jax.nn.softmax(scale * query @ key.T, axis=-1)
    return weights @ value, weights


def softmax_attention_gradient(query, key, value, output, weights, grad, *, scale):
    d_scores = weights * (grad @ value.T - (grad * output).sum(-1, keepdims=True))
    return scale * d_scores @ key, scale * d_scores.T @ query, weights.T @ grad


def reference(query, key, value, scale):
    return torch.softmax(scale * query @ key.T, dim=-1) @ value


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, 8, generator=generator) for length in (5, 7, 7)]


def on_xla(tensors, requires_grad=False):
    return [tensor.to("xla").requires_grad_(requires_grad) for tensor in tensors]


def test_forward_equals_the_cpu(tensors):
    output, weights = call_jax(softmax_attention, *on_xla(tensors), scale=0.3)
    torch.testing.assert_close(output.cpu(), reference(*tensors, 0.3), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights.cpu().sum(-1), torch.ones(5))


def test_torchax_is_not_used(tensors):
    call_jax(softmax_attention, *on_xla(tensors), scale=0.3)
    assert "torchax" not in sys.modules


def test_gradient_equals_the_cpu(tensors):
    given = on_xla(tensors, requires_grad=True)
    output = call_jax_with_gradient(softmax_attention, softmax_attention_gradient, *given, scale=0.3)
    (2 * output).square().sum().backward()
    expected = [tensor.clone().requires_grad_() for tensor in tensors]
    (2 * reference(*expected, 0.3)).square().sum().backward()
    for got, want in zip(given, expected, strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad, rtol=1e-5, atol=1e-5)


def test_stands_among_torch_operations_in_one_program(tensors):
    from torch_xla.debug import metrics

    torch_xla.sync()
    query, key, value = on_xla(tensors)
    metrics.clear_all()
    output, _ = call_jax(softmax_attention, query + 1, key * 2, value, scale=0.3)
    result = (output - 1).cpu()
    assert metrics.metric_data("CompileTime")[0] == 1
    torch.testing.assert_close(result, reference(tensors[0] + 1, tensors[1] * 2, tensors[2], 0.3) - 1)


def test_one_lowering_for_each_signature():
    traced = []

    def double(x, *, times):
        traced.append(x.shape)
        return x * times

    for shape, times in [((2, 3), 2), ((2, 3), 2), ((2, 3), 3), ((4,), 2), ((2, 3), 2)]:
        result = call_jax(double, torch.ones(shape, device="xla"), times=times)
        torch.testing.assert_close(result.cpu(), torch.full(shape, float(times)))
    assert traced == [(2, 3), (2, 3), (4,)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_scalars(dtype):
    ones = torch.ones(3).to(dtype)

    def identity_and_first(x):
        return {"all": x, "first": x[0], "nothing": None}

    result = call_jax(identity_and_first, ones.to("xla"))
    assert result["nothing"] is None and result["first"].shape == () and result["all"].dtype == dtype
    assert torch.equal(result["all"].cpu(), ones)


def test_none_and_unused_tensors():
    def first(x, unused, absent):
        assert absent is None
        return x + 1

    result = call_jax(first, torch.zeros(2, device="xla"), torch.zeros(5, device="xla"), None)
    assert torch.equal(result.cpu(), torch.ones(2))


def test_none_has_no_gradient():
    def scaled(x, bias, flags):
        return (jnp.where(flags, 3 * x, 0),)

    def scaled_gradient(x, bias, flags, output, grad):
        return jnp.where(flags, 3 * grad, 0), None, None

    x = torch.ones(2, device="xla", requires_grad=True)
    flags = torch.tensor([True, False]).to("xla")
    call_jax_with_gradient(scaled, scaled_gradient, x, None, flags).sum().backward()
    assert x.grad.cpu().tolist() == [3.0, 0.0]


def test_several_outputs_have_gradients():
    def both(x, *, factor):
        return jnp.sin(x), factor * x, jnp.cos(x)  # two outputs and a residual

    def both_gradient(x, sine, scaled, cosine, sine_grad, scaled_grad, *, factor):
        return (cosine * sine_grad + factor * scaled_grad,)

    for used in ((True, True), (True, False), (False, True)):
        x = torch.tensor([0.5, 1.0]).to("xla").requires_grad_()
        outputs = call_jax_with_gradient(both, both_gradient, x, outputs=2, factor=3.0)
        assert isinstance(outputs, tuple) and len(outputs) == 2
        sum(output.sum() for output, take in zip(outputs, used, strict=True) if take).backward()
        expected = used[0] * torch.cos(torch.tensor([0.5, 1.0])) + 3.0 * used[1]
        torch.testing.assert_close(x.grad.cpu(), expected)


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.int64, "int32"), (torch.float64, "float32")])
def test_refuses_what_jax_would_narrow(dtype, narrow):
    with pytest.raises(TypeError, match=rf"cast it to {narrow}"):
        call_jax(jnp.abs, torch.ones(2, dtype=dtype).to("xla"))


def test_refuses_other_devices_and_lost_gradients():
    with pytest.raises(ValueError, match="got one on cpu"):
        call_jax(jnp.abs, torch.ones(2))
    with pytest.raises(ValueError, match="call_jax_with_gradient"):
        call_jax(jnp.abs, torch.ones(2, device="xla", requires_grad=True))
