"""The halves of a decoder layer in C++: every instruction set this CPU has, odd sizes, features, bad input, threads."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import library
from easytorch.kernels.decoder_step import cpu, native
from easytorch.kernels.decoder_step.native import (
    AttentionWeights,
    FeedForwardWeights,
    Projection,
    QuantizedProjection,
    Slot,
)
from easytorch.kernels.quantized_matmul import interleaved
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded
from tests.kernels.quantized_matmul.blocks import random_blocks

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    rows: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    keys: int  # that the cache has memory for
    first: int
    slot: int
    end: int
    bias: bool = False
    head_norms: bool = False
    turned: int = 0
    mask: str = ""  # which of its dimensions are more than 1, of "bh"; "-" for neither, "" for no mask
    sinks: bool = False
    softcap: float | None = None


CASES = (
    Case(1, 64, 4, 2, 16, 96, 10, 0, 0, 1),
    Case(1, 128, 4, 1, 32, 200, 12, 2, 11, 12, bias=True, head_norms=True, turned=32),
    Case(3, 96, 6, 6, 24, 100, 40, 3, 30, 40, turned=10, mask="b"),
    Case(2, 128, 4, 1, 33, 64, 700, 5, 600, 601, head_norms=True, mask="h", sinks=True),
    Case(9, 70, 8, 2, 16, 97, 20, 0, 19, 20, bias=True, turned=16, mask="bh", softcap=5.0),
    Case(1, 33, 1, 1, 7, 5, 300, 0, 299, 300, turned=6, mask="-", sinks=True, softcap=2.0),
    Case(16, 64, 4, 4, 64, 64, 530, 0, 529, 530),
)


class Inputs(NamedTuple):
    x: Tensor
    attention: AttentionWeights
    feed_forward: FeedForwardWeights
    angles: tuple[Tensor, Tensor] | None
    slot: Slot
    call: AttentionCall


def inputs(case: Case, seed: int, activation: str = "silu") -> Inputs:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    c = case

    def projection(n: int, k: int) -> Projection:
        return Projection(draw(n, k) / k**0.5, draw(n) if c.bias else None)

    width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
    of_heads = [1 + draw(c.head_dim) / 4 if c.head_norms else None for _ in "qk"]
    # the heads' eps is one that counts
    attention = AttentionWeights(
        1 + draw(c.width) / 4, projection(width, c.width), projection(kv_width, c.width),
        projection(kv_width, c.width), projection(c.width, width), 1e-5, *of_heads, 0.3,
    )  # fmt: skip
    feed_forward = FeedForwardWeights(
        1 + draw(c.width) / 4, projection(c.inner, c.width), projection(c.inner, c.width),
        projection(c.width, c.inner), 1e-5, activation,
    )  # fmt: skip
    mask = None
    if c.mask:
        mask = draw(c.rows if "b" in c.mask else 1, c.heads if "h" in c.mask else 1, 1, c.end - c.first) > -0.5
        mask[..., c.slot - c.first] = True
    sinks = draw(c.heads) if c.sinks else None
    call = AttentionCall(mask=mask, sinks=sinks, scale=c.head_dim**-0.5, softcap=c.softcap)
    angles = (draw(c.rows, 1, c.turned), draw(c.rows, 1, c.turned)) if c.turned else None
    cache = [draw(c.rows, c.kv_heads, c.keys, c.head_dim) for _ in "kv"]
    return Inputs(draw(c.rows, 1, c.width), attention, feed_forward, angles, Slot(*cache, c.first, c.slot, c.end), call)


def mapped(tree: Any, function: Any) -> Any:
    """The tree of tuples and dicts with `function` applied to its floating tensors."""
    if isinstance(tree, Tensor):
        return function(tree) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {name: mapped(one, function) for name, one in tree.items()}
    if isinstance(tree, tuple):
        made = [mapped(one, function) for one in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)
    return tree


def attended(kernel: Any, given: Inputs, **more: Any) -> Tensor:
    return kernel.attention_step(given.x, given.attention, given.angles, given.slot, given.call, **more)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_steps_are_the_definitions(case: Case, level: int, dtype: torch.dtype) -> None:
    given = mapped(inputs(case, seed=level), lambda tensor: guarded(tensor.to(dtype)))
    exact = mapped(given, lambda tensor: tensor.double())
    before = given.slot.keys.clone()
    got, expected = attended(cpu, given, level=level), attended(native, exact)
    assert got.dtype == dtype and got.shape == expected.shape
    assert relative_rms_error(got, expected) <= TOLERANCE[dtype]
    for ours, theirs in zip(given.slot[:2], exact.slot[:2], strict=True):
        assert relative_rms_error(ours[:, :, case.slot], theirs[:, :, case.slot]) <= TOLERANCE[dtype]
    others = torch.arange(case.keys) != case.slot
    assert torch.equal(given.slot.keys[:, :, others], before[:, :, others]), "another token's key was written to"
    fed = cpu.feed_forward_step(given.x, given.feed_forward, level=level)
    assert relative_rms_error(fed, native.feed_forward_step(exact.x, exact.feed_forward)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("activation", native.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_activation(activation: str, dtype: torch.dtype) -> None:
    given = mapped(inputs(CASES[2], 3, activation), lambda tensor: tensor.to(dtype))
    exact = mapped(given, lambda tensor: tensor.double())
    got = cpu.feed_forward_step(given.x, given.feed_forward)
    assert relative_rms_error(got, native.feed_forward_step(exact.x, exact.feed_forward)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are, too: a thread that does not come holds up nobody."""
    for case in CASES[2:5]:
        results = []
        for threads in (1, 2, 7, 64):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            given = mapped(inputs(case, seed=5), lambda tensor: tensor.to(dtype))
            results.append((attended(cpu, given), given.slot.keys, cpu.feed_forward_step(given.x, given.feed_forward)))
        for result in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def coded(weight: QuantizedWeight, bias: Tensor | None = None) -> QuantizedProjection:
    data, scale_bits = guarded(weight.data.view(torch.uint8)), guarded(weight.scale.view(torch.int32))
    return QuantizedProjection(
        data, scale_bits, weight.zero, bias, weight.format, weight.shape[1], weight.group_size, weight.shape[0]
    )  # fmt: skip


def of_codes(rows: int, seed: int, dtype: torch.dtype) -> Inputs:
    """Projections of one input in formats of their own, one of them dense."""
    case = Case(rows, 256, 4, 2, 64, 256, 30, 0, 20, 21, bias=True, turned=64)
    given = mapped(inputs(case, seed), lambda tensor: guarded(tensor.to(dtype)))
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    attention, feed = given.attention, given.feed_forward
    zeros = quantize(draw(256, 256) / 16 + 0.05, "int4", 64, symmetric=False)
    attention = attention._replace(
        query=coded(random_blocks("q4_k", 256, 256, seed), attention.query.bias),
        key=coded(random_blocks("q6_k", 128, 256, seed)),
        value=coded(random_blocks("q4_k", 128, 256, seed + 1)),
        output=coded(zeros),
    )
    feed = feed._replace(
        gate=coded(quantize(draw(256, 256) / 16, "int8", 32), feed.gate.bias),
        down=coded(random_blocks("q8_0", 256, 256, seed)),
    )
    return given._replace(attention=attention, feed_forward=feed)


def interleaved_codes(weights: Any) -> Any:
    """With the rows of all codes interleaved."""
    coded = {
        name: one._replace(codes=guarded(interleaved.interleave(one.codes, one.format)))
        for name, one in weights._asdict().items()
        if isinstance(one, QuantizedProjection)
    }
    return weights._replace(**coded)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
def test_steps_of_quantized_weights_are_the_definitions(level: int, dtype: torch.dtype) -> None:
    for rows in (1, 3, 7):
        given = of_codes(rows, level, dtype)
        exact = mapped(given, lambda tensor: tensor.double())
        error = relative_rms_error(attended(cpu, given, level=level), attended(native, exact))
        assert error <= TOLERANCE[dtype]
        fed = cpu.feed_forward_step(given.x, given.feed_forward, level=level)
        assert relative_rms_error(fed, native.feed_forward_step(exact.x, exact.feed_forward)) <= TOLERANCE[dtype]
        attention, feed_forward = interleaved_codes(given.attention), interleaved_codes(given.feed_forward)
        other = given._replace(attention=attention, feed_forward=feed_forward)
        assert relative_rms_error(attended(cpu, other, level=level), attended(native, exact)) <= TOLERANCE[dtype]
        fed = cpu.feed_forward_step(given.x, feed_forward, level=level)
        assert relative_rms_error(fed, native.feed_forward_step(exact.x, exact.feed_forward)) <= TOLERANCE[dtype]
        given.x[-1, 0, 5] = float("nan")
        fed = cpu.feed_forward_step(given.x, given.feed_forward, level=level)
        assert fed[-1].isnan().all() and fed[:-1].isfinite().all()


def test_codes_that_do_not_fit_are_refused() -> None:
    good = of_codes(1, 0, torch.float32)
    key: Any = good.attention.key
    for changed in (
        key._replace(codes=key.codes[:, :-1].clone()),
        key._replace(codes=key.codes[:-1].clone()),
        key._replace(codes=key.codes.float()),
        key._replace(columns=512),
        key._replace(scale_bits=key.scale_bits.expand(128, 1).clone()),
        key._replace(scale_bits=key.scale_bits.double()),
        key._replace(format="q4_k"),
        key._replace(zero=torch.zeros(1, 1, dtype=torch.uint8)),
        key._replace(bias=torch.zeros(127)),
        key._replace(group_size=0),
    ):
        with pytest.raises(RuntimeError, match="easytorch"):
            attended(cpu, good._replace(attention=good.attention._replace(key=changed)))


def test_a_cache_of_any_layout() -> None:
    """Heads within a key, as a view of memory with more in it."""
    given = inputs(CASES[3], seed=6)
    wide = [one.new_zeros(one.shape[0], one.shape[2], one.shape[1] + 2, one.shape[3]) for one in given.slot[:2]]
    views = [memory[:, :, 1:-1].transpose(1, 2).copy_(one) for memory, one in zip(wide, given.slot[:2], strict=True)]
    other = given._replace(slot=Slot(*views, *given.slot[2:]))
    assert torch.equal(attended(cpu, other), attended(cpu, given))
    assert torch.equal(views[0], given.slot.keys) and not wide[0][:, :, 0].any() and not wide[0][:, :, -1].any()


def test_tensors_that_do_not_fit_are_refused() -> None:
    """By the operator itself: nothing outside a tensor is read or written, whatever its caller checked."""
    good = inputs(CASES[4], seed=7)
    attention, slot, mask = good.attention, good.slot, good.call.mask
    assert mask is not None
    x, narrow = good.x, Projection(attention.query.weight[:, :-1].contiguous(), attention.query.bias)

    def at(**places: int) -> Inputs:
        """With a mask that fits: what is refused is the place."""
        moved = slot._replace(**places)
        mask = torch.ones(1, 1, 1, moved.end - moved.first, dtype=torch.bool)
        return good._replace(slot=moved, call=good.call._replace(mask=mask))

    bad: dict[str, Inputs] = {
        "a slot beyond the cache": at(slot=20, end=21),
        "a slot before what is seen": at(slot=3, first=4),
        "a slot behind what is seen": at(slot=19, end=19),
        "no keys": at(first=20, slot=20, end=20),
        "a negative key": at(first=-1),
        "another number of rows": good._replace(slot=slot._replace(keys=slot.keys[:2], values=slot.values[:2])),
        "another dtype": good._replace(slot=slot._replace(keys=slot.keys.double())),
        "columns of the weight": good._replace(attention=attention._replace(query=narrow)),
        "a transposed weight": good._replace(
            attention=attention._replace(query=attention.query._replace(weight=attention.query.weight.T.contiguous().T))
        ),
        "heads": good._replace(attention=attention._replace(key=attention.query)),
        "the output's": good._replace(attention=attention._replace(output=attention.query)),
        "a norm": good._replace(attention=attention._replace(norm=attention.norm[:-1].clone())),
        "two tokens": good._replace(x=torch.cat([x, x], 1)),
        "not contiguous": good._replace(x=torch.cat([x, x], 2)[..., ::2]),
        "a mask": good._replace(call=good.call._replace(mask=mask[..., :-1])),
        "sinks": good._replace(call=good.call._replace(sinks=x.new_zeros(3))),
        "angles": good._replace(angles=(torch.zeros(2, 1, 16), torch.zeros(2, 1, 16))),
    }
    for what, given in bad.items():
        with pytest.raises(RuntimeError, match="easytorch"):
            attended(cpu, given)
            pytest.fail(f"{what} was taken")
    weights = good.feed_forward
    for changed in (
        weights._replace(down=weights.up),
        weights._replace(up=Projection(weights.up.weight[:-1].clone())),
        weights._replace(gate=Projection(weights.gate.weight.double(), None)),
        weights._replace(norm=weights.norm[:-1].clone()),
    ):
        with pytest.raises(RuntimeError, match="easytorch"):
            cpu.feed_forward_step(x, changed)
