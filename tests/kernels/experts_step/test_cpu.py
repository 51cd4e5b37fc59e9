"""The experts of few tokens in C++: every instruction set this CPU has, odd sizes, kinds of weights, layouts, threads,
bad input, nothing read past a tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.decoder_step.native import AnyProjection, Projection, QuantizedProjection
from easytorch.kernels.experts_step import cpu, native
from easytorch.kernels.experts_step.native import UNITS, Unit
from easytorch.kernels.linear import preference
from easytorch.kernels.quantized_matmul.weight import quantize
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_level = pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
# N, k, D, E, I: one token, an expert of many tokens, sizes that no vector or block divides
SIZES = ((9, 1, 3, 2, 1), (1, 2, 64, 8, 48), (3, 2, 70, 5, 33), (16, 4, 33, 6, 17), (2, 1, 600, 2, 700))


def inputs(size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, bias: bool = False) -> list[Any]:
    """x, indices, weights, gate_up and down; an index of E and more is of another device."""
    tokens, k, width, experts, inner = size

    def stack(n: int, columns: int) -> Projection:
        weight = (torch.randn(experts, n, columns, generator=generator) / columns**0.5).to(dtype)
        return Projection(weight, torch.randn(experts, n, generator=generator).to(dtype) if bias else None)

    x = torch.randn(tokens, width, generator=generator).to(dtype)
    indices = torch.stack([torch.randperm(experts + 1, generator=generator)[:k] for _ in range(tokens)])
    indices[0, 0] = 0  # someone's
    weights = torch.rand(tokens, k, generator=generator) + 0.5
    return [x, indices, weights, stack(2 * inner, width), stack(width, inner)]


def wide(one: Any) -> Any:
    if isinstance(one, Projection):
        return Projection(one.weight.double(), None if one.bias is None else one.bias.double())
    return one.double() if isinstance(one, Tensor) and one.is_floating_point() else one


def compare(given: list[Any], unit: Unit, level: int, share: float = 1.0) -> None:
    got = cpu.experts_step(*given, unit, level=level)
    expected = native.experts_step(*map(wide, given), unit)
    assert got.dtype == given[0].dtype
    assert got.shape == given[0].shape
    error = relative_rms_error(got, expected)
    # in half precision a number passes five roundings
    allowed = TOLERANCE[got.dtype] * share * (2 if got.dtype.itemsize == 2 else 1)
    assert error <= allowed, f"{tuple(given[0].shape)} {unit}: {error}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_level
def test_every_unit_at_odd_sizes(level: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(level)
    for place, size in enumerate(SIZES):
        for name in UNITS:
            given = inputs(size, generator, dtype, bias=place % 2 == 1)
            assert cpu.takes(given[0], *given[3:]) is False  # gradients are recorded here
            with torch.no_grad():
                taken = processor.AVX512 and (dtype != torch.float32 or preference.ONE_FLOAT32_ROW)
                assert cpu.takes(given[0], *given[3:]) is taken
            compare(given, Unit(name, 1.7, 0.9), level)


@every_level
@pytest.mark.parametrize("format_", ["int8", "int4", "nf4", "fp8_e4m3fn", "fp4_e2m1"])
def test_quantized_stacks(format_: str, level: int) -> None:
    generator = torch.Generator().manual_seed(level)
    for dtype in (torch.float32, torch.bfloat16):
        for size in ((1, 2, 64, 4, 96), (7, 3, 96, 5, 64)):
            x, indices, weights, *stacks = inputs(size, generator, dtype, bias=True)
            coded = [quantized(one, format_) for one in stacks]
            decoded = [Projection(torch.stack([q.dequantize(torch.float64) for q in parts]), one.bias.double())
                       for one, (_, parts) in zip(stacks, coded, strict=True)]  # fmt: skip
            got = cpu.experts_step(x, indices, weights, *(stack for stack, _ in coded), Unit(), level=level)
            expected = native.experts_step(x.double(), indices, weights.double(), *decoded, Unit())
            assert relative_rms_error(got, expected) <= TOLERANCE[dtype]


def quantized(stack: Projection, format_: str) -> tuple[QuantizedProjection, list[Any]]:
    parts = [quantize(one.float(), format_, 32) for one in stack.weight]
    n, k = parts[0].shape
    codes, bits = (
        torch.stack([p.data.view(torch.uint8) for p in parts]),
        torch.stack([p.scale.view(torch.int32) for p in parts]),
    )
    zero = None if parts[0].zero is None else torch.stack([p.zero for p in parts])
    return QuantizedProjection(codes, bits, zero, stack.bias, parts[0].format, k, parts[0].group_size, n), parts


@every_level
def test_any_layout_and_repeated_picks(level: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        x, _, weights, gate_up, down = inputs((5, 3, 40, 4, 24), generator, dtype, bias=True)
        indices = torch.tensor([[1, 1, 1], [4, 4, 9], [0, 3, 0], [2, 1, 0], [3, 3, 4]])

        def longer(one: Projection) -> Projection:
            assert one.bias is not None
            return Projection(torch.cat([one.weight, one.weight], 2)[:, :, : one.weight.shape[2]],
                              torch.cat([one.bias, one.bias], 1)[:, : one.bias.shape[1]])  # fmt: skip

        def shared(one: Projection) -> Projection:
            assert one.bias is not None
            return Projection(one.weight[:1].expand_as(one.weight), one.bias[:1].expand_as(one.bias))

        def by_columns(one: Projection) -> Projection:
            return one._replace(weight=one.weight.mT.contiguous().mT)

        for made in ((by_columns(gate_up), by_columns(down)), (longer(by_columns(gate_up)), shared(by_columns(down)))):
            compare([x, indices, weights, *made], Unit("clamped", 1.7, 0.9), level)
        for made in ((gate_up, down), (longer(gate_up), longer(down)), (shared(gate_up), longer(down))):
            compare([x, indices, weights, *made], Unit("gelu"), level)
        assert torch.equal(
            cpu.experts_step(x, indices * 0 + 4, weights, gate_up, down, level=level), torch.zeros_like(x)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_level
def test_stacks_stored_by_columns(level: int, dtype: torch.dtype) -> None:
    """(E, K, N), as gpt-oss has them; more rows than are summed at a time, more columns than a task has."""
    generator = torch.Generator().manual_seed(level)
    for place, size in enumerate((*SIZES, (16, 2, 18, 1, 530))):
        x, indices, weights, *stacks = inputs(size, generator, dtype, bias=place % 2 == 1)
        if place == len(SIZES):
            indices.zero_()
        turned = [one._replace(weight=one.weight.mT.contiguous().mT) for one in stacks]
        for name in ("silu", "clamped"):
            compare([x, indices, weights, *turned], Unit(name, 1.7, 0.9), level)
            compare([x, indices, weights, turned[0], stacks[1]], Unit(name, 1.7, 0.9), level)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    given = inputs((7, 3, 600, 6, 300), generator, torch.bfloat16)
    try:
        found = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(cpu.experts_step(*given))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_the_operator_refuses_what_does_not_fit() -> None:
    x, indices, weights, gate_up, down = inputs((3, 2, 8, 4, 6), torch.Generator().manual_seed(0), torch.float32)
    none, scale, zero = torch.empty(0), torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.uint8)
    good = [x, indices, weights, gate_up.weight, none, scale, zero, -1, 0, 0, down.weight, none, scale, zero, -1, 0, 0]
    good += [0, 1.0, 1.0, 1, library.BEST]
    operator = torch.ops.easytorch_cpu.experts_step.default
    assert operator(*good).shape == (3, 8)
    for index, wrong in (
        (0, x[:2]), (0, x[:, :7]), (0, x.double()), (0, x[0]), (0, x.t().contiguous().t()), (1, indices[:2]),
        (1, indices.int()), (1, indices - 9), (1, indices[:, :1]), (2, weights.double()), (2, weights[:, :1]),
        (3, gate_up.weight[:3]), (3, gate_up.weight[:, :11]), (3, gate_up.weight[..., :7]),
        (3, gate_up.weight.bfloat16()),
        (3, gate_up.weight[0]), (3, torch.zeros(4, 12, 16)[..., ::2]), (4, torch.zeros(4, 11)), (4, torch.zeros(3)),
        (10, down.weight[:, :7]), (10, down.weight[..., :5]), (11, torch.zeros(4, 8).bfloat16()), (17, 4),
        (17, -1), (20, 0),
    ):  # fmt: skip
        given = list(good)
        given[index] = wrong
        with pytest.raises(RuntimeError, match="easytorch: experts_step"):
            operator(*given)
    for codes, scales in (
        (torch.zeros(4, 12, 4), scale),
        (torch.zeros(4, 12, 4, dtype=torch.uint8), torch.zeros(3, 12, 1)),
    ):
        with pytest.raises(RuntimeError, match=r"easytorch: (experts_step|quantized_matmul)"):
            operator(x, indices, weights, codes, none, scales, zero, 1, 8, 32, *good[10:])


def read_up_to_guard_pages() -> None:
    generator = torch.Generator().manual_seed(0)

    def guarded_columns(one: Projection) -> Projection:
        return one._replace(weight=guarded(one.weight.mT).mT, bias=None if one.bias is None else guarded(one.bias))

    def guarded_stack(one: AnyProjection) -> AnyProjection:
        return one._replace(**{name: guarded(x) for name, x in one._asdict().items() if isinstance(x, Tensor)})

    for level in range(len(library.LEVELS)):
        for dtype in DTYPES:
            for size in ((9, 1, 3, 2, 1), (3, 2, 33, 4, 7), (2, 2, 63, 3, 65)):
                x, indices, weights, *stacks = inputs(size, generator, dtype, bias=True)
                given = [guarded(x), guarded(indices), guarded(weights), *map(guarded_stack, stacks)]
                for name in ("silu", "clamped"):
                    compare(given, Unit(name, 1.7, 0.9), level)
                    compare([*given[:3], *map(guarded_columns, stacks)], Unit(name, 1.7, 0.9), level)
        x, indices, weights, *stacks = inputs((3, 2, 32, 4, 64), generator, torch.bfloat16)
        coded = [guarded_stack(quantized(one, "fp4_e2m1")[0]) for one in stacks]
        cpu.experts_step(guarded(x), guarded(indices), guarded(weights), *coded, level=level)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages by mprotect")
def test_nothing_is_read_past_the_end() -> None:
    """In a process of its own, which a fault would end."""
    program = "from tests.kernels.experts_step.test_cpu import read_up_to_guard_pages as run; run()"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
