"""decode by the C++ operator: every instruction set this CPU has, odd sizes, any layout, nothing read past a tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import library
from easytorch.kernels.decode import contract, cpu, native
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
# (B, S, H, K, D, Dv): every size of a group of heads that is computed together, more keys than a block and a task have
SIZES = (
    (1, 1, 1, 1, 1, 1), (2, 65, 5, 5, 16, 20), (2, 63, 6, 2, 60, 36), (1, 300, 4, 1, 64, 64), (2, 600, 7, 1, 33, 100),
    (1, 130, 22, 2, 128, 128),
)  # fmt: skip


def features(size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> list[dict[str, Any]]:
    batch, keys, heads = size[:3]
    mask = torch.rand(batch, heads, 1, keys, generator=generator) > 0.5
    mask[0, :, :, : keys // 2] = False  # whole blocks
    return [
        {},
        {"softcap": 1.5, "softmax_scale": -0.7},
        {"mask": mask, "bias": torch.randn(heads, 1, keys, generator=generator).to(dtype)},
        {"sinks": torch.randn(heads, generator=generator).to(dtype), "mask": mask[:, :1], "softcap": 30.0},
        {"sliding_window": 9, "causal": True, "lengths": torch.randint(0, keys + 1, (batch,), generator=generator)},
        {"bias": torch.randn(1, keys, generator=generator).double(), "lengths": torch.full((batch,), keys // 2)},
    ]


def compare(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, level: int, given: dict[str, Any], share: float = 0.5
) -> None:
    wide = {name: x.double() if name in ("bias", "sinks") else x for name, x in given.items()}
    expected = native.decode(query.double(), key.double(), value.double(), **wide)
    lengths = given.get("lengths")
    call = contract.resolve(query, key, value, lengths, **{n: x for n, x in given.items() if n != "lengths"})
    got = cpu.run(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), lengths, call, level)
    assert got.dtype == query.dtype
    assert got.is_contiguous()
    error = relative_rms_error(got, expected)
    assert error <= TOLERANCE[query.dtype] * share, f"{tuple(query.shape)} {tuple(key.shape)} {list(given)}: {error}"


def tensors(size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> list[torch.Tensor]:
    batch, keys, heads, kv_heads, dim, value_dim = size
    shapes = (batch, 1, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, value_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@needs_library
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@pytest.mark.parametrize("level", library.levels_of("decode"))
def test_every_feature_at_odd_sizes(level: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(level)
    for size in SIZES:
        for given in features(size, generator, dtype):
            query, key, value = tensors(size, generator, dtype)
            for b, length in enumerate(given.get("lengths", ())):  # what lies beyond is not read
                key[b, length:], value[b, length:] = float("nan"), float("nan")
            compare(query, key, value, level, given)


@needs_library
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@pytest.mark.parametrize("heads_inside", [True, False])
def test_all_heads_of_many_sequences(heads_inside: bool, dtype: torch.dtype) -> None:
    """So many that the heads of a sequence are one task: they take turns, some at a time, whichever way they lie."""
    generator = torch.Generator().manual_seed(0)
    for kv_heads in (1, 2, 3, 4, 6, 8):
        for size in ((64, 70, 2 * kv_heads, kv_heads, 24, 20), (32, 290, kv_heads, kv_heads, 16, 16)):
            query, key, value = tensors(size, generator, dtype)
            if not heads_inside:
                key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
            lengths = torch.randint(0, size[1] + 1, (size[0],), generator=generator)
            for given in ({}, {"lengths": lengths, "causal": True, "sliding_window": 40}):
                compare(query, key, value, library.BEST, given)


@needs_library
def test_any_layout() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in cpu.DTYPES:
        query, key, value = tensors((2, 70, 6, 2, 24, 40), generator, dtype)
        heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
        strided = [torch.stack([x, x], -1)[..., 0] for x in (query, key, value)]
        longer = [torch.cat([x, x], 1)[:, x.shape[1] :] for x in (query, key, value)]
        expanded = [query[:1, :, :1].expand_as(query), key[:, :1].expand_as(key), value[:1].expand_as(value)]
        given = {"mask": torch.rand(70, 2, generator=generator)[:, 0] > 0.5, "bias": torch.randn(70).to(dtype)[:1]}
        for laid in (heads_first, strided, longer, expanded, [query, heads_first[1], strided[2]]):
            compare(*laid, library.BEST, given, share=1.0)
    query, key, value = torch.zeros(2, 1, 4, 8), torch.zeros(2, 0, 2, 8), torch.zeros(2, 0, 2, 5)
    assert torch.equal(cpu.decode(query, key, value), torch.zeros(2, 1, 4, 5))
    assert cpu.decode(query[:0], key[:0], value[:0]).shape == (0, 1, 4, 5)


@needs_library
@pytest.mark.parametrize("level", library.levels_of("decode"))
def test_extreme_scores(level: int) -> None:
    """Scores far apart, infinite and NaN: as the definition in float32 has them."""
    query, value = torch.ones(1, 1, 1, 1), torch.arange(300.0).reshape(1, 300, 1, 1)
    key = torch.zeros(1, 300, 1, 1)
    for numbers in (
        {5: 200.0, 290: 100.0}, {5: -3e38}, {0: 3e38, 1: 3e38}, {299: 88.0}, {7: float("-inf")}, {7: float("inf")},
        {7: float("nan")}, {200: float("nan"), 7: 1e4},
    ):  # fmt: skip
        given = key.clone()
        for place, number in numbers.items():
            given[0, place] = number
        for others in ({}, {"softcap": 50.0}, {"softcap": 1e6}, {"sinks": torch.tensor([-1e30])}):
            expected = native.decode(query, given, value, **others)
            call = contract.resolve(query, given, value, **others)
            got = cpu.run(query.transpose(1, 2), given.transpose(1, 2), value.transpose(1, 2), None, call, level)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    # a row that sees nothing, by its mask and by a bias
    hidden = {"mask": torch.zeros(1, 1, 1, 300, dtype=torch.bool)}, {"bias": torch.full((300,), float("-inf"))}
    for others in hidden:
        call = contract.resolve(query, key, value, **others)
        got = cpu.run(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, call, level)
        assert got.item() == 0.0


@needs_library
@pytest.mark.parametrize("level", library.levels_of("decode"))
def test_short_sequences_beside_a_long_one(level: int) -> None:
    """Each sums up the parts that it has: scores far below 0 would vanish beside a part that nobody computed."""
    generator = torch.Generator().manual_seed(level)
    lengths = torch.tensor([600, 1, 0, 256, 257, 3])
    query, key, value = tensors((6, 600, 4, 2, 16, 20), generator, torch.float32)
    for scores in (-200.0, 200.0):  # whose exponential in float32 is 0 or infinite
        given = {"lengths": lengths, "bias": torch.full((600,), scores)}
        compare(query, key, value, level, given, share=4.0)  # a float32 near 200 is exact to 1.5e-5


@needs_library
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    for size in ((1, 3000, 4, 2, 64, 64), (9, 1000, 8, 2, 64, 64)):
        query, key, value = (x.transpose(1, 2) for x in tensors(size, generator, torch.bfloat16))
        try:
            found = []
            for number in (1, 2, 5):
                torch.set_num_threads(number)
                call = contract.resolve(*(x.transpose(1, 2) for x in (query, key, value)))
                found.append(cpu.run(query, key, value, None, call, library.BEST))
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


@needs_library
def test_the_operator_refuses_what_does_not_fit() -> None:
    query, key, value = torch.zeros(2, 4, 1, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 6)
    fields = AttentionCall._fields
    good = [query, key, value, None, *AttentionCall(), library.BEST]
    assert torch.ops.easytorch_cpu.decode.default(*good).shape == (2, 1, 4, 6)
    of_call = {name: 4 + place for place, name in enumerate(fields)}
    mask, bias, sinks = of_call["mask"], of_call["bias"], of_call["sinks"]
    for index, wrong in (
        (0, query[:1]), (0, query[..., :7]), (0, query[:, :3]), (0, query.expand(2, 4, 2, 8)), (0, query[0]),
        (0, query.double()), (1, key[:, :, :4]), (1, key.bfloat16()), (1, key[..., :0]), (1, key[:, :0]),
        (1, torch.zeros(2, 2, 5, 16)[..., ::2]), (2, value[:1]), (2, torch.zeros(2, 2, 6, 5).transpose(2, 3)),
        (mask, torch.ones(2, 4, 1, 4, dtype=torch.bool)), (mask, torch.ones(2, 4, 1, 5)), (bias, torch.zeros(2, 4, 5)),
        (bias, torch.zeros(2, 4, 1, 5).double()), (sinks, torch.zeros(3)), (sinks, torch.zeros(8)[::2]),
        (3, torch.tensor([1, 6])), (3, torch.tensor([-1, 2])), (3, torch.tensor([1])), (3, torch.tensor([1, 2]).int()),
    ):  # fmt: skip
        given = list(good)
        given[index] = wrong
        with pytest.raises(RuntimeError, match=r"easytorch: (decode|attention)"):
            torch.ops.easytorch_cpu.decode.default(*given)


def read_up_to_guard_pages() -> None:
    generator = torch.Generator().manual_seed(0)
    for level in range(len(library.LEVELS)):
        for dtype in cpu.DTYPES:
            for size in ((1, 1, 1, 1, 1, 1), (1, 67, 3, 1, 33, 31), (2, 5, 4, 2, 63, 65), (1, 9, 8, 1, 20, 96)):
                given = {"mask": torch.ones(size[0], size[2], 1, size[1], dtype=torch.bool)}
                given["bias"] = torch.randn(given["mask"].shape, generator=generator).to(dtype)
                given["sinks"] = torch.randn(size[2], generator=generator).to(dtype)
                query, key, value = (guarded(x) for x in tensors(size, generator, dtype))
                compare(query, key, value, level, {name: guarded(x) for name, x in given.items()})


@needs_library
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages by mprotect")
def test_nothing_is_read_past_the_end() -> None:
    """In a process of its own, which a fault would end."""
    program = "from tests.kernels.decode.test_cpu import read_up_to_guard_pages as run; run()"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
