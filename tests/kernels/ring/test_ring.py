"""The ring against the definition in float64, output and every gradient, with threads for ranks."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.ring import aten_blocks, blocks, native
from easytorch.kernels.ring.native import Shard

CASES = [
    "plain", "causal", "softcap", "window", "sides", "segments", "sinks", "bias", "bias of keys", "dropout",
    "everything",
]  # fmt: skip
ATEN = ["causal", "window"]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [(48, 48), (24, 72), (72, 24)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_float64(case, lengths, size, layout, ring_cases, ring_errors):
    tensors, features = ring_cases[case](*lengths)
    for kernel in (blocks, aten_blocks) if case in ATEN else (blocks,):
        errors = ring_errors(kernel, size, layout, tensors, features, torch.float64)
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("kernel", [blocks, aten_blocks], ids=["native", "aten"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_other_dtypes(dtype, tolerance, kernel, ring_cases, ring_errors):
    for case in ATEN if kernel is aten_blocks else ("causal", "everything"):
        errors = ring_errors(kernel, 3, "zigzag", *ring_cases[case](48, 48), dtype)
        assert errors.pop("output") <= tolerance
        assert max(errors.values()) <= 2 * tolerance, errors


def test_more_rows_than_a_block(ring_cases, ring_errors):
    errors = ring_errors(blocks, 1, "contiguous", *ring_cases["everything"](300, 300), torch.float64)
    assert max(errors.values()) < 1e-12, errors


def shard_of(queries, keys, **changes):
    q, k = torch.randn(1, queries, 2, 8), torch.randn(1, keys, 1, 8)
    return Shard(q, k, k, AttentionCall(scale=0.3, right=0)._replace(**changes), "contiguous")


def test_empty_sequences(run_ranks):
    for queries, keys in ((0, 4), (4, 0)):
        shard = shard_of(queries, keys)
        (result, *_), _ = run_ranks(2, lambda ring, shard=shard: native.forward(ring, shard, aten_blocks))
        assert result[0].shape == (1, queries, 2, 8) and (result[0] == 0).all()


def test_what_nobody_needs_is_not_sent(run_ranks):
    _, sent = run_ranks(4, lambda ring: native.forward(ring, shard_of(16, 16), blocks))
    assert sent == [3, 3, 3, 3]
    _, sent = run_ranks(4, lambda ring: native.forward(ring, shard_of(16, 16, left=4), blocks))
    assert sent == [1, 1, 1, 1]
