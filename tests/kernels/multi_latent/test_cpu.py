"""Latent attention of few tokens by the C++ operator: every instruction set this CPU has, odd sizes, any layout, every
feature, nothing read past a tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import library, processor
from easytorch.kernels.multi_latent import cpu, native
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from tests.kernels.linear.guard import guarded

needs_library = pytest.mark.skipif(library.missing() is not None, reason=f"no C++ kernels: {library.missing()}")
every_level = pytest.mark.parametrize("level", range(len(library.LEVELS)), ids=library.LEVELS)
# (B, T, H, S, L, R, Dn, Dv): several blocks of keys, every number of rows that is computed together, rows that see
# nothing, and widths that no vector divides
SIZES = (
    (3, 1, 5, 1, 1, 1, 1, 2), (2, 1, 6, 63, 36, 10, 30, 20), (2, 3, 7, 300, 33, 9, 17, 5), (1, 7, 20, 40, 48, 0, 7, 31),
    (1, 4, 3, 2, 16, 16, 0, 3),
)  # fmt: skip
Size = tuple[int, ...]


def tensors(size: Size, generator: torch.Generator, dtype: torch.dtype) -> list[torch.Tensor | None]:
    batch, tokens, heads, keys, width, rope, dim, value_dim = size
    shapes = (
        (batch, tokens, heads, dim), (batch, tokens, heads, rope), (batch, keys, width), (batch, keys, rope),
        (heads, dim, width), (heads, value_dim, width),
    )  # fmt: skip
    query, query_rope, latent, key_rope, up_key, up_value = (torch.randn(s, generator=generator) for s in shapes)
    up_key, up_value = up_key / max(dim, 1) ** 0.5, up_value / width**0.5  # as in a model: what bfloat16 can round
    return [x.to(dtype) for x in (query, query_rope, latent, key_rope, up_key, up_value)]


def features(size: Size, generator: torch.Generator) -> list[dict[str, Any]]:
    batch, tokens, heads, keys = size[:4]
    mask = torch.rand(batch, heads, tokens, keys, generator=generator) > 0.4
    mask[0, :, :, : keys // 2] = False  # whole blocks
    ids = torch.arange(keys).div(20, rounding_mode="floor").expand(batch, keys)
    segments = {"query_segment_ids": ids[:, -1:].expand(batch, tokens), "key_segment_ids": ids}
    return [
        {}, {"causal": True, "softmax_scale": 0.3}, {"sliding_window": 9, "causal": True}, {"sliding_window": (2, 1)},
        {"mask": mask, "bias": torch.randn(heads, tokens, keys, generator=generator)},
        {"mask": mask[:, :1], "softcap": 1.5, "causal": True},
        {"sinks": torch.randn(heads, generator=generator), "bias": torch.randn(1, tokens, 1, generator=generator)},
        segments,
    ]  # fmt: skip


def compare(
    given: list[torch.Tensor | None], level: int, of_call: dict[str, Any], share: float = 0.5
) -> None:  # fmt: skip
    query, query_rope, latent, key_rope, up_key, up_value = given
    assert query is not None and query_rope is not None and latent is not None and key_rope is not None
    wide = {name: x.double() if name in ("bias", "sinks") else x for name, x in of_call.items()}
    scale = wide.pop("softmax_scale", 0.7 * (query.shape[-1] + query_rope.shape[-1]) ** -0.5)
    expected, _ = native.multi_latent_attention(
        *(None if x is None else x.double() for x in given), softmax_scale=scale, **wide
    )  # type: ignore[arg-type]
    others = {name: x for name, x in of_call.items() if name != "softmax_scale"}
    call = cpu.resolve(query, query_rope, latent, scale, others)
    got = cpu.run(query, query_rope, latent, key_rope, up_key, up_value, call, level)
    assert got.dtype == query.dtype
    assert got.shape == expected.shape
    assert got.is_contiguous()
    error = relative_rms_error(got, expected)
    assert error <= TOLERANCE[query.dtype] * share, (
        f"{tuple(query.shape)} {tuple(latent.shape)} {list(of_call)}: {error}"
    )


@needs_library
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@every_level
def test_every_feature_at_odd_sizes(level: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(level)
    for size in SIZES:
        for given in features(size, generator):
            compare(tensors(size, generator, dtype), level, given)


@needs_library
@every_level
def test_without_one_projection_or_both(level: int) -> None:
    generator = torch.Generator().manual_seed(level)
    for dtype in cpu.DTYPES:
        for absent in ((4,), (5,), (4, 5)):
            size = (2, 2, 5, 70, 34, 6, 34 if 4 in absent else 12, 20)
            given = tensors(size, generator, dtype)
            if 4 in absent:
                assert given[0] is not None
                given[0] = given[0] / 34**0.5
            for place in absent:
                given[place] = None
            compare(given, level, {"causal": True})


@needs_library
def test_a_models_widths_and_more_queries_than_a_block() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in cpu.DTYPES:
        compare(tensors((1, 1, 16, 700, 512, 64, 128, 128), generator, dtype), library.BEST, {})
        compare(tensors((2, 9, 30, 530, 32, 8, 16, 16), generator, dtype), library.BEST, {"causal": True})


@needs_library
def test_any_layout() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in cpu.DTYPES:
        given = tensors((2, 3, 4, 70, 24, 10, 12, 20), generator, dtype)
        present = [x for x in given if x is not None]
        reversed_ = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in present]
        strided = [torch.stack([x, x], -1)[..., 0] for x in present]
        longer = [torch.cat([x, x], 1)[:, x.shape[1] :] for x in present]
        expanded = [x[:1].expand_as(x) for x in present]
        # latent and key_rope, and the two projections, as views of one tensor
        row = torch.cat([present[2], present[3]], -1)
        ups = torch.cat([present[4], present[5]], 1)
        views = [*present[:2], row[..., :24], row[..., 24:], ups[:, :12], ups[:, 12:]]
        for laid in (reversed_, strided, longer, expanded, views):
            compare(list(laid), library.BEST, {"causal": True}, share=1.0)


@needs_library
def test_what_is_empty() -> None:
    ups = torch.ones(4, 8, 6), torch.ones(4, 5, 6)
    query, rope, latent, key_rope = (
        torch.ones(2, 3, 4, 8),
        torch.ones(2, 3, 4, 2),
        torch.ones(2, 7, 6),
        torch.ones(2, 7, 2),
    )
    nothing = cpu.multi_latent_attention(query, rope, latent[:, :0], key_rope[:, :0], *ups)
    assert torch.equal(nothing, torch.zeros(2, 3, 4, 5))
    assert cpu.multi_latent_attention(query[:0], rope[:0], latent[:0], key_rope[:0], *ups).shape == (0, 3, 4, 5)
    assert cpu.multi_latent_attention(query[:, :0], rope[:, :0], latent, key_rope, *ups).shape == (2, 0, 4, 5)
    hidden = cpu.multi_latent_attention(query, rope, latent, key_rope, *ups, mask=torch.zeros(1, dtype=torch.bool))
    assert torch.equal(hidden, torch.zeros(2, 3, 4, 5))


@needs_library
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    given = tensors((2, 5, 40, 900, 48, 16, 20, 24), generator, torch.bfloat16)
    try:
        found = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(cpu.multi_latent_attention(*given, causal=True))  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_library
@pytest.mark.skipif(not processor.AVX512, reason="chosen where it was measured")
def test_it_is_chosen_for_few_tokens_over_a_cache() -> None:
    generator = torch.Generator().manual_seed(0)
    operation = OperationRegistry.create("multi_latent_attention")
    for dtype in cpu.DTYPES:
        for tokens in (1, 16):
            given = tensors((1, tokens, 4, 300, 32, 8, 16, 16), generator, dtype)
            few = tokens * 4 <= cpu.MOST_QUERIES.get(dtype, 64)
            assert operation.choose(*given).backend == ("cpu" if few else "aten")
    assert operation.choose(*tensors((1, 1, 33, 300, 32, 8, 16, 16), generator, torch.float32)).backend == "aten"
    many = tensors((1, 17, 1, 300, 32, 8, 16, 16), generator, torch.float32)
    assert operation.choose(*many).backend == "aten"
    expands = tensors((1, 16, 4, 16, 32, 8, 16, 16), generator, torch.float32)
    assert operation.choose(*expands).backend == "aten"
    trains = tensors((1, 1, 4, 300, 32, 8, 16, 16), generator, torch.float32)
    assert trains[2] is not None
    trains[2].requires_grad_()
    assert operation.choose(*trains).backend == "aten"
    assert operation.choose(*given, dropout_prob=0.1).backend == "aten"
    with torch.no_grad():
        assert operation.choose(*trains).backend == "cpu"


@needs_library
def test_the_operator_refuses_what_does_not_fit() -> None:
    query, rope, latent, key_rope = (
        torch.zeros(2, 3, 4, 8),
        torch.zeros(2, 3, 4, 2),
        torch.zeros(2, 7, 6),
        torch.zeros(2, 7, 2),
    )
    up_key, up_value = torch.zeros(4, 8, 6), torch.zeros(4, 5, 6)
    good = [query, rope, latent, key_rope, up_key, up_value, *AttentionCall(), library.BEST]
    operator = torch.ops.easytorch_cpu.multi_latent.default
    assert operator(*good).shape == (2, 3, 4, 5)
    of_call = {name: 6 + place for place, name in enumerate(AttentionCall._fields)}
    for index, wrong in (
        (0, query[:1]), (0, query[..., :7]), (0, query[0]), (0, query.double()), (1, rope[:, :2]), (1, rope[..., :1]),
        (1, rope[:, :, :3]), (1, rope.bfloat16()), (2, latent[:1]), (2, latent[:, :6]), (2, latent[..., :5]),
        (2, torch.zeros(2, 6, 7).mT), (2, latent[..., :0]), (3, key_rope[:, :6]), (3, torch.zeros(2, 7, 4)[..., ::2]),
        (4, up_key[:3]), (4, up_key[:, :7]), (4, torch.zeros(4, 6, 8).mT), (4, up_key.bfloat16()), (4, None),
        (5, up_value[..., :5]), (5, up_value[0]), (5, torch.zeros(4, 6, 5).mT),
        (of_call["mask"], torch.ones(2, 4, 3, 6, dtype=torch.bool)), (of_call["bias"], torch.zeros(4, 2, 7)),
        (of_call["sinks"], torch.zeros(3)), (of_call["dropout_prob"], 0.5),
    ):  # fmt: skip
        given = list(good)
        given[index] = wrong
        with pytest.raises(RuntimeError, match=r"easytorch: (multi_latent|attention)"):
            operator(*given)


def read_up_to_guard_pages() -> None:
    generator = torch.Generator().manual_seed(0)
    for level in range(len(library.LEVELS)):
        for dtype in cpu.DTYPES:
            for size in ((3, 1, 5, 1, 1, 1, 1, 2), (1, 2, 3, 67, 33, 7, 9, 5), (2, 1, 5, 16, 63, 1, 65, 63)):
                given = {"mask": torch.ones(size[0], size[2], size[1], size[3], dtype=torch.bool)}
                given["bias"] = torch.randn(given["mask"].shape, generator=generator)
                given["sinks"] = torch.randn(size[2], generator=generator)
                made = [None if x is None else guarded(x) for x in tensors(size, generator, dtype)]
                compare(made, level, {name: guarded(x) for name, x in given.items()})


@needs_library
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages by mprotect")
def test_nothing_is_read_past_the_end() -> None:
    """In a process of its own, which a fault would end."""
    program = "from tests.kernels.multi_latent.test_cpu import read_up_to_guard_pages as run; run()"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
