"""Attention of many queries by the operator in C++: every instruction set this CPU has, every feature, odd sizes, any
layout, buffers with a guard page behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.attention import cpu, native, preference
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.cpu import library, processor
from easytorch.operations import OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = pytest.mark.parametrize("level", library.levels_of("attention"))
# (B, T, S, H, K, D, Dv); a task has 48 queries, a tile 128 keys, a panel 16 or 8 of them
SIZES = [
    (1, 1, 1, 1, 1, 1, 1), (2, 7, 7, 2, 1, 16, 16), (1, 50, 130, 4, 2, 33, 40), (2, 97, 97, 3, 3, 64, 64),
    (1, 49, 300, 2, 1, 80, 17), (1, 200, 64, 2, 2, 7, 5), (1, 48, 128, 2, 2, 32, 96), (1, 5, 0, 2, 1, 8, 8),
]  # fmt: skip


def attention(backend: str | None = None) -> Any:
    return OperationRegistry.create("attention", OperationMetadata(backend=backend))


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads(size: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    batch, length, keys, query_heads, kv_heads, dim, value_dim = size
    shapes = ((length, query_heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim))
    return [numbers((batch, *shape), dtype, seed) for seed, shape in enumerate(shapes)]


def features(size: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    batch, length, keys, query_heads = size[:4]
    seen = numbers((batch, 1, length, keys), torch.float32, 3) > -0.5
    documents = [torch.arange(count).expand(batch, -1) // 21 for count in (length, keys)]
    mixed = [(numbers((batch, count), torch.float32, 7) * 2).int() for count in (length, keys)]
    yield from (
        {}, {"causal": True}, {"causal": True, "sliding_window": 9}, {"sliding_window": (3, 20)},
        {"sliding_window": (None, 2), "softmax_scale": -0.3}, {"softcap": 2.0, "causal": True}, {"softmax_scale": 0.0},
        {"sinks": numbers((query_heads,), torch.float32), "causal": True}, {"mask": seen, "causal": True},
        {"mask": seen[:, :, :1], "sinks": numbers((query_heads,), torch.float16)},
        {"bias": numbers((query_heads, length, keys), torch.bfloat16), "softcap": 5.0},
        {"bias": numbers((length, 1), torch.float64), "mask": seen, "sliding_window": (30, 0)},
        {"query_segment_ids": documents[0], "key_segment_ids": documents[1]},
        {"query_segment_ids": documents[0] + 1, "key_segment_ids": documents[1], "causal": True, "softcap": 5.0},
        {"query_segment_ids": mixed[0], "key_segment_ids": mixed[1], "sliding_window": (40, 9)},
        {"dropout_prob": 0.3, "seed": 11, "causal": True},
        {"dropout_prob": 0.6, "seed": -5, "sinks": numbers((query_heads,), torch.float32),
         "query_segment_ids": documents[0], "key_segment_ids": documents[1]},
    )  # fmt: skip


def wide(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in options.items()}


def check(got: Tensor, expected: Tensor, dtype: torch.dtype, *case: Any) -> None:
    assert got.shape == expected.shape and got.dtype == dtype and got.is_contiguous()
    if expected.numel() == 0 or expected.abs().max() == 0:
        assert not got.count_nonzero(), case
    else:
        assert relative_rms_error(got, expected) <= TOLERANCE[dtype], case


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@LEVELS
def test_every_feature_at_odd_sizes(level: int, dtype: torch.dtype) -> None:
    for size in SIZES:
        query, key, value = heads(size, dtype)
        for options in features(size):
            expected = native.attention(query.double(), key.double(), value.double(), **wide(options))[0]
            given = [guarded(x) if x.numel() else x for x in (query, key, value)]
            call = resolve(query, key, value, **options)
            call = call._replace(**{
                name: guarded(getattr(call, name))
                for name in ("mask", "bias", "query_segment_ids", "key_segment_ids", "sinks")
                if getattr(call, name) is not None and getattr(call, name).numel()
            })  # fmt: skip
            check(cpu.run(*given, call, level), expected, dtype, size, options)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layout(dtype: torch.dtype) -> None:
    many = numbers((3, 70, 6, 80), dtype)
    queries = [
        many[:2, :60, :4, :32], many[:2, :, :4, :32].transpose(1, 2).contiguous().transpose(1, 2),
        many[:2, :60, :4, ::2][..., :32], many[:1, :60, :4, 3:35].expand(2, 60, 4, 32), many[:2, :1, :4, :32],
        many[:2, :1, :4, :32].expand(2, 60, 4, 32), many[:2, :, :1, :32].expand(2, 70, 4, 32), many[:0, :60, :4, :32],
        many[:2, :0, :4, :32], torch._neg_view(many[:2, :60, :4, :32]),
    ]  # fmt: skip
    for query in queries:
        for key, value in (
            (many[1:3, :, :2, :32], many[:2, :, 2:4, 5:25]),
            (many[1:3, :, ::3, ::2][..., :32], many[:2, :1, 2:4].expand(2, 70, 2, 80)),
            (many[:1, :, 4:, 40:72].expand(2, 70, 2, 32), many[:2, :, 2:4, :0]),
        ):
            key, value = key[: query.shape[0]], value[: query.shape[0]]
            expected = native.attention(query.double(), key.double(), value.double(), causal=True)[0]
            check(attention("flash:cpu")(query, key, value, causal=True).attention_outputs, expected, dtype)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@LEVELS
def test_the_ends_of_the_range_are_the_definitions(level: int, dtype: torch.dtype) -> None:
    """NaN and infinities where the definition has them, and scores so large that one key takes all weight."""
    query, key, value = heads((1, 60, 140, 2, 1, 32, 20), dtype)
    largest = float(torch.finfo(dtype).max)
    query[0, 3, 0, 4], query[0, 5, 1], query[0, 50, 1, 2] = float("nan"), 0.0, float("inf")
    query[0, 7, :, 0], key[0, 9, 0, 0] = min(largest, 1e30) / 4, 8.0  # no other key comes near it
    value[0, 5, 0, 3], value[0, 0, 0, 1] = float("inf"), float("nan")
    for options in ({}, {"causal": True}, {"causal": True, "softcap": 3.0}, {"causal": True, "sinks": torch.ones(2)}):
        got = cpu.run(query, key, value, resolve(query, key, value, **options), level)
        expected = native.attention(query, key, value, **options)[0]
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=2e-2, atol=2e-2)
    sinks = torch.tensor([float("inf"), float("-inf")])
    query, key, value = heads((1, 5, 5, 2, 1, 8, 8), dtype)
    got = cpu.run(query, key, value, resolve(query, key, value, sinks=sinks), level)
    assert got[0, :, 0].isnan().all()
    check(got[:, :, 1:].contiguous(), native.attention(query, key, value)[0][:, :, 1:].double(), dtype)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@LEVELS
def test_scores_that_rise_and_fall_over_the_keys(level: int, dtype: torch.dtype) -> None:
    """Largest scores in any block of keys, a little or far above those before, and blocks that are all hidden."""
    query, key, value = heads((1, 4, 1100, 4, 2, 16, 24), dtype)
    query[..., 0], steps = 4.0, torch.arange(1100)
    for heights in (steps / 30, 40 - steps / 30, steps // 256 * 3.0, (steps // 300 % 2) * 60.0, steps * 0.0 - 5):
        key[..., 0] = heights[:, None].to(dtype)
        for options in (
            {}, {"mask": steps >= 520}, {"sinks": torch.tensor([0.0, 30.0, -9.0, 60.0])}, {"causal": True},
            {"bias": heights.expand(1, 1100)}, {"dropout_prob": 0.4, "seed": 3}, {"softcap": 40.0},
        ):  # fmt: skip
            expected = native.attention(query.double(), key.double(), value.double(), **wide(options))[0]
            got = cpu.run(query, key, value, resolve(query, key, value, **options), level)
            check(got, expected, dtype, heights, options)


@needs_library
def test_several_threads_give_the_bits_of_one() -> None:
    query, key, value = heads((2, 300, 300, 4, 2, 32, 32), torch.bfloat16)
    call = resolve(query, key, value, causal=True)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(cpu.run(query, key, value, call, library.BEST))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


@needs_library
def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = attention()
    query, key, value = (torch.empty(1, 1024, count, 64, dtype=torch.bfloat16) for count in (4, 2, 2))
    ids = torch.zeros(1, 1024, dtype=torch.int64)
    given: list[dict[str, Any]] = [
        {"causal": True}, {"causal": True, "softmax_scale": 0.3}, {}, {"causal": True, "softcap": 3.0},
        {"causal": True, "sinks": torch.zeros(4)}, {"causal": True, "sliding_window": 99},
    ]  # fmt: skip
    for available in (True, False):
        monkeypatch.setattr(processor, "AVX2", available)
        for options in given:
            choice = operation.choose(query, key, value, **options)
            assert (choice.implementation == "flash" and choice.backend == "cpu") == available, options
    monkeypatch.setattr(processor, "AVX2", True)
    packed: dict[str, Any] = {"query_segment_ids": ids, "key_segment_ids": ids}
    mask = torch.ones(1024, 1024, dtype=torch.bool)
    for options in ({"mask": mask}, {"bias": torch.zeros(1)}, {"mask": mask, **packed}):
        assert operation.choose(query, key, value, **options).backend != "cpu"
    wide = (query.float(), key.float(), value.float())
    given_bias, trained = torch.zeros(4, 1, 1024), torch.zeros(4, 1, 1024, requires_grad=True)
    for options in (
        {"bias": given_bias, "causal": True}, {"bias": given_bias, "softcap": 3.0}, {"bias": trained},
        {"bias": given_bias, "dropout_prob": 0.1}, {"bias": trained, **packed},
    ):  # fmt: skip
        assert operation.choose(query, key, value, **options).backend == "cpu"
        assert operation.choose(*wide, **options).backend == "cpu"
    leaf = value.clone().requires_grad_()
    assert operation.choose(query, key, leaf, bias=given_bias).backend == "cpu"
    assert operation.choose(*wide[:2], leaf.detach().float().requires_grad_(), bias=given_bias).backend != "cpu"
    short = [x[:, :511] for x in wide]
    assert operation.choose(*short, bias=trained[..., :511]).backend != "cpu"
    assert operation.choose(*short, bias=trained[..., :511], causal=True).backend == "cpu"
    for few in (wide, (query, key, value), (query.half(), key.half(), value.half())):
        assert operation.choose(*few, **packed).backend == "cpu"
        assert operation.choose(*few, dropout_prob=0.1).backend == "cpu"
        cut = {name: one[:, :128] for name, one in packed.items()}
        assert operation.choose(*(one[:, :128] for one in few), **cut).backend == "cpu"
        assert operation.choose(*(one[:, :127] for one in few), dropout_prob=0.1).backend != "cpu"
    assert operation.choose(*wide, causal=True).backend == "cpu"
    assert operation.choose(*wide).backend != "cpu"
    assert operation.choose(query[:, :127], key, value, causal=True).backend != "cpu"
    assert operation.choose(wide[0][:, :255], *wide[1:], causal=True).backend != "cpu"
    half = (query.half(), key.half(), value.half())
    assert operation.choose(*half, causal=True).backend == "cpu"
    assert operation.choose(*half, causal=True, softcap=3.0).backend != "cpu"
    assert operation.choose(*(x[..., :63] for x in wide), causal=True).backend != "cpu"
    assert operation.choose(query.double(), key.double(), value.double(), causal=True).backend != "cpu"
    for few in (half, wide, (query, key, value)):
        rows, *rest = (x[:, :128] for x in few)
        assert operation.choose(rows.clone().requires_grad_(), *rest, causal=True).backend == "cpu"
        assert (operation.choose(rows, *rest, causal=True).backend == "cpu") == (few is not wide)
    leaf = value.clone().requires_grad_()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # more than heads of keys: some would have no work
    assert operation.choose(query, key, leaf, causal=True).backend != "cpu"
    assert operation.choose(query, key, value, causal=True).backend == "cpu"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert operation.choose(query, key, leaf, causal=True).backend == "cpu"
    described = (x.to("meta") for x in (query, key, value))
    assert operation.choose_on("cpu", tuple(described), {"causal": True}).backend != "cpu"
    with torch.autocast("cpu", torch.bfloat16):
        assert operation.choose(*wide, causal=True).backend != "cpu"
        assert operation.choose(query, key, value, causal=True).backend == "cpu", "there is nothing to cast"
    narrow = OperationRegistry.create("attention", OperationMetadata(runtime_dtype=torch.bfloat16))
    assert narrow.choose(query, key, value, causal=True).backend != "cpu"


@needs_library
def test_a_forced_call_that_it_does_not_take_is_refused() -> None:
    query, key, value = heads((1, 9, 9, 2, 1, 8, 8), torch.float32)
    ends = torch.tensor([0, 4, 9])
    with pytest.raises(NotImplementedError, match="float64"):
        cpu.attention(query.double(), key.double(), value.double())
    flash = OperationRegistry.create("flash", OperationMetadata(backend="cpu"))
    with pytest.raises(UnsupportedOperationError, match="packed sequences"):
        flash(query, key, value, cu_seqlens_q=ends, cu_seqlens_k=ends)
    with pytest.raises(UnsupportedOperationError, match="float64"):
        flash(query.double(), key.double(), value.double())
    with pytest.raises(ValueError, match="mask must be boolean"):
        cpu.attention(query, key, value, mask=torch.zeros(9, 9))


@needs_library
def test_the_operator_refuses_what_does_not_fit() -> None:
    query, key, value = heads((1, 9, 9, 2, 1, 8, 8), torch.float32)
    ids = torch.zeros(1, 9, dtype=torch.int64)

    def run(query: Tensor, key: Tensor, value: Tensor, **fields: Any) -> Tensor:
        return torch.ops.easytorch_cpu.flash.default(query, key, value, *AttentionCall(**fields), 3)

    for wrong, fields, why in (
        ((query[0], key, value), {}, "four dimensions"), ((query, key[..., :7], value), {}, "do not fit"),
        ((query, key, value[:, :8]), {}, "do not fit"), ((query.half(), key, value), {}, "one dtype"),
        ((query[:, :, :1], key.expand(1, 9, 2, 8), value.expand(1, 9, 2, 8)), {}, "a multiple"),
        ((query.mT, key.expand(1, 9, 1, 8), value), {}, "do not fit"),
        ((query, key.transpose(1, 3).contiguous().transpose(1, 3), value), {}, "must be contiguous"),
        ((query, key, value), {"mask": torch.zeros(9, 9)}, "boolean"),
        ((query, key, value), {"bias": torch.zeros(1, 2, 9, 8)}, "mask and bias broadcast"),
        ((query, key, value), {"bias": torch.zeros(1, 1, 1, 9, 9)}, "mask and bias broadcast"),
        ((query, key, value), {"bias": torch.zeros(9, 9).double()}, "bias and sinks are"),
        ((query, key, value), {"sinks": torch.zeros(3)}, "sinks are"),
        ((query, key, value), {"left": 2**60}, "too far"), ((query, key, value), {"right": -(2**60)}, "too far"),
        ((query, key, value), {"dropout_prob": 0.5}, "then a seed"),
        ((query, key, value), {"seed": ids[0, 0]}, "then a seed"),
        ((query, key, value), {"seed": ids[0, 0], "dropout_prob": 1.0}, "then a seed"),
        ((query, key, value), {"seed": ids[0], "dropout_prob": 0.5}, "one number"),
        ((query, key, value), {"query_segment_ids": ids}, "of queries and keys"),
        ((query, key, value), {"query_segment_ids": ids, "key_segment_ids": ids[:, :8]}, "segment ids are"),
        ((query, key, value), {"query_segment_ids": ids, "key_segment_ids": ids.int()}, "segment ids are"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=why):
            run(*wrong, **fields)


@needs_library
def test_amx_multiplies_plain_bfloat16_in_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AVX2", True)
    plain = heads((1, 300, 300, 4, 2, 64, 64), torch.bfloat16)
    trained = [x.requires_grad_() for x in heads((1, 300, 300, 4, 4, 64, 64), torch.bfloat16)]
    for amx in (False, True):
        monkeypatch.setattr(processor, "AMX_PRODUCTS", amx)
        assert preference.prefers_cpp(*plain, {"causal": True}) != amx
        assert preference.prefers_cpp(*plain, {"causal": True, "softcap": 5.0}), "SDPA has none"
        assert preference.prefers_cpp(*(x.float() for x in plain), {"causal": True})
        assert preference.prefers_cpp(*trained, {"causal": True})
