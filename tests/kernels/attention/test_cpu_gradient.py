"""Gradients of attention of many queries in C++: every instruction set this CPU has, every feature, odd sizes, any
layout, buffers with a guard page behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.attention import cpp_call, cpu, native
from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.cpu import library
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.attention.test_cpu import (
    DTYPES,
    LEVELS,
    SIZES,
    attention,
    features,
    heads,
    needs_library,
    numbers,
    wide,
)
from tests.kernels.linear.guard import guarded

# a block has 96 keys and 64 queries
MORE = [(1, 130, 200, 4, 2, 24, 16), (1, 70, 97, 2, 2, 100, 8)]
FIELDS = ("bias", "sinks")  # of a call, that have gradients


def by_definition(given: list[Tensor], grad: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """The output and the gradients of query, key, value, bias and sinks, in float64."""
    options = wide(options)
    leaves = [x.double().requires_grad_() for x in given]
    leaves += [options[name].requires_grad_() for name in FIELDS if name in options]
    output = native.attention(*leaves[:3], **options)[0]
    found = torch.autograd.grad(output, leaves, grad.double(), allow_unused=True)
    return [output.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))]


def computed(given: list[Tensor], grad: Tensor, options: dict[str, Any], level: int) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in given]
    call = resolve(*leaves, **options)
    for name in FIELDS:
        if name in options:
            leaves.append(options[name].detach().requires_grad_())
            call = call._replace(**{name: leaves[-1]})
    output = cpu.run(*leaves[:3], call, level)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def check(got: list[Tensor], expected: list[Tensor], given: list[Tensor], *case: Any) -> None:
    options = next((x for x in case if isinstance(x, dict)), {})
    names = ["output", "query", "key", "value", *(name for name in FIELDS if name in options)]
    for name, one, wanted in zip(names, got, expected, strict=True):
        assert one.shape == wanted.shape and one.isfinite().all(), (name, *case)
        if wanted.numel() and wanted.abs().max() > 1e-6:
            # the gradients of sinks and of a bias that broadcasts are sums of few large terms that cancel
            cancels = name == "sinks" or (name == "bias" and (1 in one.shape or one.dim() < 3))
            limit = max(TOLERANCE[given[0].dtype], TOLERANCE[one.dtype]) * (8 if cancels else 2)
            assert relative_rms_error(one, wanted) <= limit, (name, *case)
        else:
            assert one.abs().sum() <= 1e-2, (name, *case)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@LEVELS
def test_every_feature_at_odd_sizes(level: int, dtype: torch.dtype) -> None:
    for size in (SIZES + MORE)[(level + DTYPES.index(dtype)) % 3 :: 3]:  # all of them for each dtype
        given = heads(size, dtype)
        grad = numbers((*given[0].shape[:3], given[2].shape[3]), dtype, 9)
        for options in features(size):
            expected = by_definition(given, grad, options)
            behind = [guarded(x) if x.numel() else x for x in (*given, grad)]
            check(computed(behind[:3], behind[3], options, level), expected, given, size, options)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@LEVELS
def test_a_bias_of_every_shape(level: int, dtype: torch.dtype) -> None:
    """Pairs of (b, kv head) that share a bias, in lanes of several and of one, and every dimension that broadcasts."""
    for size in ((3, 70, 101, 4, 2, 16, 8), (9, 33, 40, 4, 2, 8, 8)):
        batch, length, keys, count = size[:4]
        given = heads(size, dtype)
        grad = numbers((batch, length, count, size[6]), dtype, 9)
        ids = [torch.arange(n).expand(batch, -1) // 30 for n in (length, keys)]
        for number, shape in enumerate((
            (batch, count, length, keys), (count, length, keys), (batch, 1, length, keys), (length, keys),
            (batch, count, 1, keys), (1, keys), (keys,), (batch, count, length, 1), (length, 1), (count, 1, 1), (),
        )):  # fmt: skip
            features: tuple[dict[str, Any], ...] = (
                {"causal": True}, {"softcap": 2.0, "sinks": numbers((count,), torch.float32)},
                {"query_segment_ids": ids[0], "key_segment_ids": ids[1], "sliding_window": (30, 9)},
                {"dropout_prob": 0.4, "seed": 3, "sinks": numbers((count,), torch.float32)},
            )  # fmt: skip
            kind = DTYPES[(number + level) % 3]
            bias = numbers(shape, kind, 4)
            options = {"bias": guarded(bias) if bias.dim() else bias, **features[number % 4]}
            expected = by_definition(given, grad, options)
            check(computed(given, grad, options, level), expected, given, size, options, shape)
            turned = bias.mT.contiguous().mT if bias.dim() > 1 else bias.expand(shape)
            again = computed(given, grad, options | {"bias": turned}, level)
            for one, other in zip(computed(given, grad, options, level), again, strict=True):
                assert torch.equal(one, other), (size, shape)


@needs_library
def test_any_layout() -> None:
    many = numbers((3, 70, 6, 80), torch.bfloat16)
    for given in (
        [many[:2, :60, :4, ::2][..., :32], many[1:3, :, ::3, ::2][..., :32], many[:2, :1, 2:4].expand(2, 70, 2, 80)],
        [many[:2, :1, :4, :9].expand(2, 60, 4, 9), many[:1, :, 4:, 40:49].expand(2, 70, 2, 9), many[:2, :, 2:4, 5:25]],
        [many[:2, :0, :4, :32], many[:2, :, :2, :32], many[:2, :, 2:4, :9]],
        [many[:2, :, :4, :32], many[:2, :0, :2, :32], many[:2, :0, 2:4, :9]],
        [many[:2, :, :4, :32], many[:2, :, :2, :32], many[:2, :, 2:4, :0]],
        [many[:0, :, :4, :32], many[:0, :, :2, :32], many[:0, :, 2:4, :9]],
    ):  # fmt: skip
        shape = (*given[0].shape[:3], given[2].shape[3])
        for grad in (
            numbers(shape[::-1], torch.bfloat16).permute(3, 2, 1, 0),
            torch.ones((), dtype=torch.bfloat16).expand(shape),
        ):
            options = {"causal": True}
            check(computed(given, grad, options, library.BEST), by_definition(given, grad, options), given, shape)


@needs_library
def test_threads_give_the_bits_of_one_and_again() -> None:
    given = heads((2, 300, 300, 4, 2, 32, 32), torch.bfloat16)
    grad = numbers((2, 300, 4, 32), torch.bfloat16, 5)
    threads = torch.get_num_threads()
    for bias in ((4, 300, 300), (300, 300)):
        options = {"causal": True, "sinks": torch.ones(4), "bias": numbers(bias, torch.bfloat16, 3)}
        try:
            results = []
            for count in (1, 3, 3):
                torch.set_num_threads(count)
                results.append(computed(given, grad, options, library.BEST))
        finally:
            torch.set_num_threads(threads)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_library
def test_only_what_is_asked_for_and_every_order() -> None:
    query, key, value = heads((1, 9, 9, 2, 1, 8, 8), torch.float32)
    sinks, bias = numbers((2,), torch.float32, 4), numbers((2, 9, 9), torch.float32, 5)
    given = (query, key, value, sinks, bias)
    operation = attention("flash:cpu")

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
        output: Tensor = operation(query, key, value, causal=True, sinks=sinks, bias=bias).attention_outputs
        return output

    for place in range(5):
        leaves = [x.clone().requires_grad_(place == n) for n, x in enumerate(given)]
        output = attend(*leaves)
        output.sum().backward()
        expected = native.attention(query, key, value, causal=True, sinks=sinks, bias=bias)[0]
        torch.testing.assert_close(output.detach(), expected)
        assert [leaf.grad is not None for leaf in leaves] == [place == n for n in range(5)]
    leaves = [x.clone().requires_grad_() for x in given]

    def penalty(attend: Any) -> list[Tensor]:
        first = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    expected = penalty(lambda q, k, v, s, b: native.attention(q, k, v, causal=True, sinks=s, bias=b)[0])
    for got, wanted in zip(penalty(attend), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    rows = torch.autograd.grad(attend(*leaves), leaves, torch.ones(3, 1, 9, 2, 8), is_grads_batched=True)
    assert rows[0].shape == (3, *query.shape) and torch.equal(rows[0][0], rows[0][2])


@needs_library
def test_the_operator_refuses_what_does_not_fit() -> None:
    query, key, value = heads((1, 9, 9, 2, 1, 8, 8), torch.float32)
    fields = cpp_call.arguments(resolve(query, key, value))
    output, logsumexp = torch.ops.easytorch_cpu.flash_training.default(query, key, value, *fields, 3)
    for grad, kept, lse in (
        (output[..., :7], output, logsumexp), (output, output[:, :8], logsumexp), (output.double(), output, logsumexp),
        (output, output.half(), logsumexp), (output, output[0], logsumexp), (output, output, logsumexp[:, :1]),
        (output, output, logsumexp.double()), (output, output, logsumexp[:, :, 0]), (output, output, logsumexp.mT),
        (output.mT.contiguous().mT, output, logsumexp),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"do not fit|logsumexp is|must be contiguous"):
            torch.ops.easytorch_cpu.flash_backward.default(grad, query, key, value, kept, lse, *fields, False, 3)
    with pytest.raises(RuntimeError, match="there is no bias"):
        torch.ops.easytorch_cpu.flash_backward.default(output, query, key, value, output, logsumexp, *fields, True, 3)
