"""Numbers of NumPy, of every width, and odd ones of Python: every attention computes what the definition does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.impl import UnsupportedOperationError

NAMES = {
    "vanilla": None, "attention": None, "sdpa": None, "sdpa:native": "native", "flash": None, "flash:native": "native",
    "blocksparse": None, "blocksparse:native": "native", "ring": None, "ring:native": "native", "decode": None,
    "decode:native": "native",
}  # fmt: skip


def run(name: str, *tensors: torch.Tensor, **features: Any) -> torch.Tensor:
    operation = OperationRegistry.create(name.split(":")[0], OperationMetadata(backend=NAMES[name]))
    output: torch.Tensor = operation(*tensors, **features).attention_outputs
    return output


def tensors(name: str, length: int = 9) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    rows = 1 if name.startswith("decode") else length
    query = torch.randn(2, rows, 2, 8, generator=draw)
    return query, *(torch.randn(2, length, 2, 8, generator=draw) for _ in range(2))


ODD = [
    *({"sliding_window": (kind(3), kind(0))} for kind in (np.int8, np.uint8, np.int32, np.uint64)),
    *({"sliding_window": kind(4)} for kind in (np.int8, np.uint8, np.uint16)),
    {"sliding_window": np.int32(2**31 - 1)},
    {"sliding_window": np.uint64(2**64 - 1)},
    {"sliding_window": (2**70, np.int64(2**40))},
    *({"softmax_scale": number} for number in (np.float16(-0.25), np.int8(-2), np.uint8(2), np.array(0.25), 10**30)),
    *({"softcap": number} for number in (np.float32(0.5), np.float16(0.5), np.uint8(2), np.array(2.0), 2)),
    {"dropout_prob": np.float32(0.0)},
    {"dropout_prob": 0},
]


def plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(plain(one) for one in value)
    return value.item() if hasattr(value, "dtype") else value


@pytest.mark.parametrize("name", NAMES)
def test_are_pythons_numbers(name: str) -> None:
    query, key, value = tensors(name)
    query.requires_grad_()  # NumPy's arrays take the product with a tensor over, and refuse one with a gradient
    for features in ODD:
        if name == "sdpa" and "softcap" in features:
            continue
        said = {keyword: plain(x) for keyword, x in features.items()}
        said = {keyword: float(x) if keyword != "sliding_window" else x for keyword, x in said.items()}
        output = run(name, query, key, value, **features)
        expected = run("vanilla", query, key, value, **said)
        torch.testing.assert_close(output, expected, rtol=2e-5, atol=2e-5, msg=lambda m, f=features: f"{f}: {m}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "features",
    [
        {"softmax_scale": 10**400}, {"softmax_scale": 1e300}, {"softmax_scale": np.bool_(True)}, {"softcap": 1e-300},
        {"softcap": 1e300}, {"softcap": 0}, {"softcap": np.int64(-1)}, {"softcap": True}, {"softcap": "2"},
        {"dropout_prob": 1}, {"dropout_prob": None}, {"dropout_prob": np.bool_(False)}, {"sliding_window": np.uint8(0)},
        {"sliding_window": np.array([2, 3])}, {"sliding_window": np.array(4.0)}, {"sliding_window": np.bool_(True)},
        {"sliding_window": (np.int8(-2), 1)}, {"seed": np.array([3])},
    ],
    ids=repr,
)  # fmt: skip
def test_are_refused_alike(name: str, features: dict[str, Any]) -> None:
    (keyword,) = features
    with pytest.raises((ValueError, TypeError), match=keyword):
        try:
            run(name, *tensors(name), **features)
        except UnsupportedOperationError:
            pytest.skip("it does not carry the feature at all")


@pytest.mark.parametrize("name", NAMES)
def test_segments_of_two_dtypes(name: str) -> None:
    for length in (9, 65):
        query, key, value = tensors(name, length)
        draw = torch.Generator().manual_seed(length)
        query_ids, key_ids = (torch.randint(0, 3, x.shape[:2], generator=draw) for x in (query, key))
        expected = run("vanilla", query, key, value, query_segment_ids=query_ids, key_segment_ids=key_ids)
        for kinds in (
            (torch.int8, torch.uint8), (torch.uint8, torch.int32), (torch.int16, torch.int64), (torch.uint8,) * 2,
            (torch.uint16, torch.uint16), (torch.uint32, torch.int8),
        ):  # fmt: skip
            given = {"query_segment_ids": query_ids.to(kinds[0]), "key_segment_ids": key_ids.to(kinds[1])}
            output = run(name, query, key, value, **given)
            torch.testing.assert_close(output, expected, rtol=2e-5, atol=2e-5, msg=lambda m, k=kinds: f"{k}: {m}")


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("decode")])
def test_no_query_still_gives_gradients(name: str) -> None:
    query, key, value = tensors(name)
    inputs = [x.requires_grad_() for x in (query[:, :0].clone(), key, value)]
    run(name, *inputs).sum().backward()
    for tensor in inputs:
        assert tensor.grad is not None and not tensor.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["attention", "sdpa", "flash", "blocksparse", "ring", "vanilla", "decode"])
def test_a_query_of_nan_gives_nan_in_its_row_alone(name: str, causal: bool, dtype: torch.dtype) -> None:
    """Beside few keys the maximum of ATen's kernel skips it, and its row would be zeros."""
    generator = torch.Generator().manual_seed(0)
    for keys in (1, 6, 15, 16, 17, 40):
        length = 1 if name == "decode" else keys
        query, key, value = (
            torch.randn(1, rows, 2, 16, generator=generator).to(dtype) for rows in (length, keys, keys)
        )
        query[0, -1, 0] = torch.nan
        got = OperationRegistry.create(name)(query, key, value, causal=causal).attention_outputs
        wanted = torch.zeros_like(query, dtype=torch.bool)
        wanted[0, -1, 0] = True
        assert torch.equal(got.isnan(), wanted), keys
