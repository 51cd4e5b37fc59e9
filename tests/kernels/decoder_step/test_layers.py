"""Many layers by one operator: as by the definition, with the bits of the halves one by one; lists that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.cpu import library
from easytorch.kernels.decoder_step import cpu, native
from easytorch.kernels.decoder_step.native import LayerWeights, PagesOfLayer, SlotOfLayer
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.decoder_step.test_cpu import DTYPES, Case, inputs, interleaved_codes, mapped, of_codes
from tests.kernels.decoder_step.test_pages import Pages, over_pages
from tests.kernels.linear.guard import guarded

pytestmark = [
    pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}"),
    pytest.mark.skipif(not cpu.TAKES_LISTS, reason="torch hands no lists to operators of its stable interface"),
]

# Layers of one model, which differ in all that layers may: biases, norms of heads, angles, masks, windows, sinks.
CASES = (
    Case(3, 96, 6, 2, 24, 100, 40, 3, 30, 31, head_norms=True, turned=10, mask="b"),
    Case(3, 96, 4, 4, 16, 70, 300, 0, 280, 281, bias=True, sinks=True, softcap=5.0),
    Case(3, 96, 8, 1, 32, 33, 20, 0, 12, 20, mask="-", turned=32),
)


def over_slots(dtype: torch.dtype, level: int = 0) -> tuple[Tensor, list[LayerWeights], list[SlotOfLayer]]:
    made = [mapped(inputs(case, level + i), lambda one: guarded(one.to(dtype))) for i, case in enumerate(CASES)]
    layers = [
        LayerWeights(one.attention, one.feed_forward._replace(activation=name), *one.call[6:7], one.call.softcap,
                     one.call.sinks)
        for one, name in zip(made, native.ACTIVATIONS, strict=True)
    ]  # fmt: skip
    return made[0].x, layers, [SlotOfLayer(one.slot, one.angles, one.call.mask) for one in made]


def by_halves(x: Tensor, layers: list[LayerWeights], memory: list[Any], level: int) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("attention_step", "attention_step_pages", "feed_forward_step"):
            half = getattr(cpu, name)
            patch.setattr(native, name, lambda *given, half=half: half(*given, level=level))
        return native.decoder_layers(x, layers, memory)


def copied(memory: list[Any]) -> list[Any]:
    return [mapped(one, lambda tensor: tensor.clone()) for one in memory]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
def test_layers_over_slots_are_the_definitions(level: int, dtype: torch.dtype) -> None:
    x, layers, memory = over_slots(dtype, level)
    exact = mapped((x, tuple(layers), tuple(memory)), lambda tensor: tensor.double())
    apart = copied(memory)
    expected, halves = native.decoder_layers(*exact), by_halves(x, layers, apart, level)
    got = cpu.decoder_layers(x, cpu.pack_layers(layers, dtype), memory, level=level)
    assert relative_rms_error(got, expected) <= 2 * TOLERANCE[dtype]
    assert torch.equal(got, halves), "not the bits of the halves"
    for one, other in zip(memory, apart, strict=True):
        assert torch.equal(one.slot.keys, other.slot.keys) and torch.equal(one.slot.values, other.slot.values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_over_pages_are_the_definitions(dtype: torch.dtype) -> None:
    tables = (
        Pages([1, 2], [20, 300], 16),
        Pages([1, 2], [20, 300], 16, window=8),
        Pages([1, 2], [9, 40], 4, kept=False),
    )
    layers, memory = [], []
    for i, (case, pages) in enumerate(zip(CASES, tables, strict=True)):
        drawn = inputs(case._replace(mask=""), i)
        made = mapped(over_pages(case, pages, i, drawn), lambda one: guarded(one.to(dtype)))
        weights = mapped((drawn.attention, drawn.feed_forward, drawn.call.sinks), lambda one: guarded(one.to(dtype)))
        layers.append(LayerWeights(*weights[:2], drawn.call.scale, drawn.call.softcap, weights[2]))
        memory.append(PagesOfLayer(made.pages, made.angles, made.call.left))
        x = made.x
    exact = mapped((x, tuple(layers), tuple(memory)), lambda tensor: tensor.double())
    apart = copied(memory)
    expected, halves = native.decoder_layers(*exact), by_halves(x, layers, apart, library.BEST)
    got = cpu.decoder_layers_pages(x, cpu.pack_layers(layers, dtype), memory)
    assert relative_rms_error(got, expected) <= 2 * TOLERANCE[dtype]
    assert torch.equal(got, halves), "not the bits of the halves"
    for one, other in zip(memory, apart, strict=True):
        for ours, theirs in zip(one.pages[:2], other.pages[:2], strict=True):
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_of_quantized_weights(dtype: torch.dtype) -> None:
    made = [of_codes(3, seed, dtype) for seed in (0, 1)]
    layers = [LayerWeights(one.attention, one.feed_forward, one.call.scale) for one in made]
    layers[1] = layers[1]._replace(attention=interleaved_codes(layers[1].attention))
    memory = [SlotOfLayer(one.slot, one.angles) for one in made]
    halves = by_halves(made[0].x, layers, copied(memory), library.BEST)
    assert torch.equal(cpu.decoder_layers(made[0].x, cpu.pack_layers(layers, dtype), memory), halves)


def test_lists_that_do_not_fit_are_refused() -> None:
    """By the operator itself, whatever its caller checked; what it was handed is freed."""
    x, layers, memory = over_slots(torch.float32)
    packed = cpu.pack_layers(layers, x.dtype)
    short = [packed._replace(**{name: getattr(packed, name)[:-1]}) for name in packed._fields]
    empty = [packed._replace(**{name: []}) for name in packed._fields]
    more = [packed._replace(tensors=[*packed.tensors, x]), packed._replace(numbers=[*packed.numbers, 0.0])]
    for bad in (*short, *empty, *more):
        with pytest.raises(RuntimeError, match="easytorch"):
            cpu.decoder_layers(x, bad, memory)
    slot = memory[1].slot
    for places in (
        memory[:2],
        [*memory, memory[0]],
        [memory[0], memory[1]._replace(slot=slot._replace(end=301)), memory[2]],
        [memory[0], memory[1]._replace(slot=slot._replace(keys=slot.keys[:2])), memory[2]],
        [memory[0], memory[1]._replace(mask=torch.ones(1, 1, 1, 5, dtype=torch.bool)), memory[2]],
    ):
        with pytest.raises(RuntimeError, match="easytorch"):
            cpu.decoder_layers(x, packed, places)
    for bad_x in (x[:2], x[..., :-1].contiguous(), x.bfloat16()):
        with pytest.raises(RuntimeError, match="easytorch"):
            cpu.decoder_layers(bad_x, packed, memory)


def test_nothing_is_left_of_a_call() -> None:
    """Neither of one that returns nor of one that is refused: a tensor's memory is freed with its last name."""
    x, layers, memory = over_slots(torch.float32)
    packed = cpu.pack_layers(layers, x.dtype)
    users = [one._use_count() for one in packed.tensors]  # type: ignore[operator]
    cpu.decoder_layers(x, packed, memory)
    with pytest.raises(RuntimeError, match="easytorch"):
        cpu.decoder_layers(x, packed, memory[:2])
    assert [one._use_count() for one in packed.tensors] == users  # type: ignore[operator]
