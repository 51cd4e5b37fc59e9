"""The Triton kernel on latents against the definition in float64, on a GPU: over dense and paged caches.

Under TRITON_INTERPRET=1 the same cases run on the CPU; test_triton.py does that in a process of its own.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from easytorch.kernels.multi_latent import native, paged
from easytorch.kernels.multi_latent.triton_op import multi_latent_attention, ragged_page_multi_latent_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.usefixtures("poisoned_empty"),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def check(function: Any, definition: Any, tensors: dict[str, Any], dtype: torch.dtype, **features: Any) -> None:
    given = {
        n: x.to(dtype) if x.is_floating_point() else x for n, x in {**tensors, **features}.items() if torch.is_tensor(x)
    }
    rest = {name: x for name, x in features.items() if not torch.is_tensor(x)}
    want = definition(**{n: x.double() if x.is_floating_point() else x for n, x in given.items()}, **rest)
    want = want[0] if isinstance(want, tuple) else want
    got = function(**given, **rest)
    assert got.dtype == dtype and got.isfinite().all()
    error = (got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error <= TOLERANCE[dtype], f"relative RMS error {error:.2e}"


def dense(length: int, keys: int, heads: int = 5, latent: int = 40, rope: int = 12) -> dict[str, torch.Tensor]:
    shapes = ((2, length, heads, latent), (2, length, heads, rope), (2, keys, latent), (2, keys, rope))
    return dict(zip(("query", "query_rope", "latent", "key_rope"), (randn(*s) for s in shapes), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 5])
def test_dense(length: int, dtype: torch.dtype) -> None:
    # scores of width 40 with the scale of a model's own head_dim
    check(multi_latent_attention, native.multi_latent_attention, dense(length, 50), dtype, causal=True)


def test_projections_and_features() -> None:
    tensors = {**dense(2, 50), "query": randn(2, 2, 5, 24), "up_key": randn(5, 24, 40), "up_value": randn(5, 20, 40)}
    features = {"sinks": randn(5), "softcap": 2.0, "sliding_window": (20, 3), "softmax_scale": 0.3}
    check(multi_latent_attention, native.multi_latent_attention, tensors, torch.float32, **features)


@pytest.mark.parametrize("pair", [False, True])
def test_paged(pair: bool) -> None:
    pages = randn(9, 8, 52)
    tables = {
        "context_lens": torch.tensor([30, 9], device=DEVICE), "query_start_loc": torch.tensor([0, 1, 6], device=DEVICE),
        "block_tables": torch.tensor([[3, 1, 8, 0], [2, 5, -1, -1]], device=DEVICE),
    }  # fmt: skip
    tensors = {"query": randn(7, 20, 24), "query_rope": randn(7, 20, 12), **tables, "up_key": randn(20, 24, 40)}

    def cached(function: Any) -> Any:
        def call(**arguments: Any) -> torch.Tensor:
            cache = pages.to(arguments["query"].dtype)
            return function(latent_pages=tuple(cache.split([40, 12], dim=-1)) if pair else cache, **arguments)

        return call

    check(cached(ragged_page_multi_latent_attention), cached(paged.definition), tensors, torch.float32)


@pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 64])
def test_deepseek(length: int, dtype: torch.dtype) -> None:
    tensors = dense(length, 3000, 128, 512, 64)
    check(multi_latent_attention, native.multi_latent_attention, tensors, dtype, causal=True, softmax_scale=192**-0.5)
