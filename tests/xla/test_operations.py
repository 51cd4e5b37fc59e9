"""Operations on xla tensors: they take the tpu path, and equal the CPU's, gradients included."""

from __future__ import annotations

import pytest
import torch

from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error
from easytorch.operations.dispatch.platform import platform_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(function, tensors):
    """The outputs and gradients of `function(*tensors)` on xla and on the CPU, as two lists of host tensors."""
    results = []
    for device in ("xla", "cpu"):
        given = [t.detach().to(device).requires_grad_(t.is_floating_point()) for t in tensors]
        outputs = function(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weights = [randn(*output.shape, seed=9, dtype=output.dtype).to(device) for output in outputs]
        sum((o * w).float().sum() for o, w in zip(outputs, weights, strict=True)).backward()
        gradients = [t.grad for t in given if t.is_floating_point()]
        results.append([t.detach().cpu() for t in (*outputs, *gradients)])
    return results


def assert_both_equal(function, tensors, tolerance=1e-5):
    got, want = both(function, tensors)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype
        assert relative_rms_error(a, b) < tolerance, f"output or gradient {index}"


def test_the_platform_of_xla_is_tpu():
    assert platform_of((torch.ones(2, device="xla"),), {}) == "tpu"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rms_norm(dtype):
    operation = OperationRegistry.create("rms_norm")
    tensors = [randn(2, 7, 24, dtype=dtype), randn(24, seed=1, dtype=dtype)]
    assert_both_equal(operation, tensors, TOLERANCE[dtype])


def test_rotary():
    angles = randn(2, 7, 8, seed=2)
    tensors = [randn(2, 7, 4, 8), randn(2, 7, 2, 8, seed=1)]
    operation = OperationRegistry.create("rotary")
    cos, sin = angles.cos(), angles.sin()
    assert_both_equal(lambda q, k: operation(q, k, cos.to(q.device), sin.to(q.device)), tensors)


FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": 5},
    "softcap": {"softcap": 2.0},
    "mask": {"mask": torch.rand(2, 1, 19, 23, generator=torch.Generator().manual_seed(5)) < 0.7},
    "bias": {"bias": randn(1, 4, 19, 23, seed=6)},
    "sinks": {"causal": True, "sinks": randn(4, seed=7)},
    "segments": {
        "query_segment_ids": (torch.arange(19) // 7).repeat(2, 1),
        "key_segment_ids": (torch.arange(23) // 8).repeat(2, 1),
    },
    "dropout": {"dropout_prob": 0.3, "seed": 12},
}


def attention_tensors(dtype=torch.float32):
    return [
        randn(2, 19, 4, 8, dtype=dtype),
        randn(2, 23, 2, 8, seed=1, dtype=dtype),
        randn(2, 23, 2, 8, seed=2, dtype=dtype),
    ]


def attend(operation, features, query, key, value):
    moved = {name: x.to(query.device) if isinstance(x, torch.Tensor) else x for name, x in features.items()}
    return operation(query, key, value, **moved).attention_outputs


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("backend", ["vanilla", "flash"])
def test_attention(backend, features):
    operation = OperationRegistry.create("attention", OperationMetadata(backend=backend))
    assert_both_equal(lambda *tensors: attend(operation, FEATURES[features], *tensors), attention_tensors())


@pytest.mark.parametrize("features", FEATURES)
def test_attention_in_blocks_of_the_definition(features):
    operation = OperationRegistry.create("attention", OperationMetadata(backend="flash:native"))
    assert_both_equal(lambda *tensors: attend(operation, FEATURES[features], *tensors), attention_tensors())


def test_second_order_gradients_of_attention_are_refused():
    """Also where the leaf is in the loss itself: a lost graph would be no error of autograd's own there."""
    query = torch.randn(1, 8, 2, 8, device="xla").requires_grad_()
    flash = OperationRegistry.create("flash", OperationMetadata(backend="xla"))
    loss = flash(query, query, query, causal=True).attention_outputs.square().sum() + query.square().sum()
    (first,) = torch.autograd.grad(loss, query, create_graph=True)
    with pytest.raises(RuntimeError, match="force the definition"):
        torch.autograd.grad(first.square().sum(), query)


def test_attention_in_blocks_trains_under_autocast():
    operation = OperationRegistry.create("attention", OperationMetadata(backend="flash:native"))

    def run(*tensors):
        with torch.autocast(tensors[0].device.type, dtype=torch.bfloat16):
            return operation(*tensors, causal=True).attention_outputs

    # the CPU's products are bfloat16, those on xla stay float32
    assert_both_equal(run, attention_tensors(), 2e-2)


def test_attention_bfloat16():
    operation = OperationRegistry.create("attention", OperationMetadata(backend="flash"))
    # gradients pass through rounded outputs twice
    assert_both_equal(
        lambda *tensors: attend(operation, {"causal": True}, *tensors), attention_tensors(torch.bfloat16), 2e-2
    )


def test_the_choice_on_tpu_is_jax_inside_the_graph(count_programs):
    operation = OperationRegistry.create("attention")
    tensors = [tensor.to("xla") for tensor in attention_tensors()]
    choice = operation.choose(*tensors, causal=True)
    assert (choice.implementation, choice.backend, choice.platform) == ("flash", "xla", "tpu")

    def run():
        # among torch operations: one program in all, and none for the second call
        for _ in range(2):
            (operation(tensors[0] + 1, *tensors[1:], causal=True).attention_outputs * 2).cpu()

    assert count_programs(run) == 1
