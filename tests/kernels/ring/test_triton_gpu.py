"""The ring with the Triton kernels for its tiles, on a GPU or in Triton's interpreter (test_triton_interpreter.py)."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
]
CASES = ["plain", "causal", "softcap", "window", "sides", "segments", "sinks", "bias", "bias of keys"]
if INTERPRETED:  # seconds each: a diagonal, a band that is neither, and what goes with the keys
    CASES = ["causal", "window", "segments", "bias"]


LOCK = threading.Lock()


def one_at_a_time() -> SimpleNamespace:
    """The block kernels behind a lock: the ranks are threads, and the interpreter runs one kernel at a time."""
    from easytorch.kernels.ring import triton_blocks

    def locked(function):
        def call(*arguments):
            with LOCK:
                return function(*arguments)

        return call

    return SimpleNamespace(forward=locked(triton_blocks.forward), backward=locked(triton_blocks.backward))


def smaller(tensors, features):
    """The second sequence alone, two query heads of one key head: the interpreter takes a second for a few tiles."""
    heads = {"query": 2, "key": 1, "value": 1}
    tensors = {n: x[1:, :, : heads[n]] if n in heads else x[1:, :2] for n, x in tensors.items()}
    return tensors, {n: x[1:] if isinstance(x, torch.Tensor) else x for n, x in features.items()}


@pytest.mark.parametrize("case", CASES)
def test_float32(case, ring_cases, ring_errors):
    tensors, features = ring_cases[case](20, 44)
    if INTERPRETED:
        tensors, features = smaller(tensors, features)
    errors = ring_errors(
        one_at_a_time(), 2, "contiguous" if case == "window" else "zigzag", tensors, features, torch.float32, DEVICE
    )
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("level", [1e6, 1e30])
def test_equal_products_that_are_large(level, ring_cases, ring_errors):
    tensors, features = ring_cases["causal"](20, 44)
    if INTERPRETED:
        tensors, features = smaller(tensors, features)
    tensors["query"] = tensors["query"].round() * level
    tensors["key"] = torch.zeros_like(tensors["key"])
    tensors["key"][..., 0] = 1.0  # its products are exact, and alike for every key of a row
    errors = ring_errors(one_at_a_time(), 2, "zigzag", tensors, features, torch.float32, DEVICE)
    assert errors.pop("query") >= 0.0  # a sum that cancels to nothing
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, ring_cases, ring_errors):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates float32 to bfloat16 where a GPU rounds")
    errors = ring_errors(one_at_a_time(), 2, "zigzag", *ring_cases["causal"](20, 20), dtype, DEVICE)
    assert errors.pop("output") <= TOLERANCE[dtype]
    assert max(errors.values()) <= 2 * TOLERANCE[dtype], errors
