"""Decoding in jax and in Pallas (its interpreter) against the definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from easytorch.kernels.decode.contract import resolve
from easytorch.kernels.decode.native import decode as definition

pytest.importorskip("jax", reason="jax is not installed: pip install 'easytorch[jax]'")
pytestmark = pytest.mark.jax_cpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
B, S, H, K, D, DV = 3, 300, 6, 2, 60, 36
LENGTHS = torch.tensor([0, 131, S], dtype=torch.int32)


def cache(b: int = B, s: int = S, h: int = H, k: int = K, d: int = D, dv: int = DV) -> dict[str, torch.Tensor]:
    return {"query": torch.randn(b, 1, h, d), "key": torch.randn(b, s, k, d), "value": torch.randn(b, s, k, dv)}


def segments() -> dict[str, torch.Tensor]:
    return {"query_segment_ids": torch.tensor([[0], [7], [1]]), "key_segment_ids": torch.randint(0, 2, (B, S))}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": cache,
    "mha": lambda: cache(h=3, k=3),
    "mqa": lambda: cache(k=1),
    "short": lambda: cache(s=5),
    "lengths": lambda: {**cache(), "lengths": LENGTHS},
    "window": lambda: {**cache(), "sliding_window": 40, "causal": True},
    "window and lengths": lambda: {**cache(), "sliding_window": 140, "lengths": LENGTHS},
    "softcap": lambda: {**cache(), "softcap": 1.5, "softmax_scale": 0.5},
    "mask": lambda: {**cache(), "mask": torch.rand(B, H, 1, S) > 0.5},
    "mask that hides all": lambda: {
        **cache(), "mask": torch.tensor([True, False, True]).reshape(B, 1, 1, 1), "sinks": torch.randn(H),
    },
    "bias": lambda: {**cache(), "bias": torch.randn(H, 1, S), "mask": torch.rand(S) > 0.5},
    "segments": lambda: {**cache(), **segments()},
    "sinks": lambda: {**cache(), "sinks": torch.randn(H) * 3, "lengths": LENGTHS},
    "everything": lambda: {
        **cache(), **segments(), "mask": torch.rand(B, 1, 1, S) > 0.2, "bias": torch.randn(1, H, 1, S), "causal": True,
        "sliding_window": 250, "softcap": 4.0, "sinks": torch.randn(H), "softmax_scale": 0.3, "lengths": LENGTHS,
    },
}  # fmt: skip


def _to_jax(name: str, x: torch.Tensor) -> Any:
    from easytorch.kernels.interop.dlpack import to_jax

    return to_jax(x.to(torch.int32) if x.dtype == torch.int64 else x)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES]
    + [(case, dtype) for case in ("plain", "everything") for dtype in (torch.float16, torch.bfloat16)],
)
@pytest.mark.parametrize("kernel", ["jax", "pallas"])
def test_equals_the_definition(kernel: str, case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from easytorch.kernels.attention.call import map_tensors
    from easytorch.kernels.decode import jax_native, pallas_kernel
    from easytorch.kernels.interop.dlpack import to_torch

    torch.manual_seed(0)
    monkeypatch.setattr(pallas_kernel, "BLOCKS", (128,))  # a cache of three blocks, the last cut off
    given = CASES[case]()
    floating = {n for n, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    given = {n: x.to(dtype) if n in floating else x for n, x in given.items()}
    expected = definition(**{n: x.double() if n in floating else x for n, x in given.items()})
    if "lengths" in given:  # what lies beyond is not read
        for b, length in enumerate(given["lengths"]):
            given["key"][b, length:] = float("nan")
            given["value"][b, length:] = float("nan")
    call = resolve(**given)
    module = pallas_kernel if kernel == "pallas" else jax_native
    settings: dict[str, Any] = {"interpret": True} if kernel == "pallas" else {}
    arrays = [None if x is None else _to_jax("", x) for x in map(given.get, ("query", "key", "value", "lengths"))]
    got = to_torch(module.decode(*arrays, map_tensors(call, _to_jax), **settings))
    assert got.dtype == dtype
    assert got.isfinite().all()
    difference, scale = (x.double().square().mean().sqrt() for x in (got - expected, expected))
    assert difference <= TOLERANCE[dtype] * scale, f"relative RMS error {float(difference / scale):.2e}"


def test_blocks_fit_vector_memory() -> None:
    import jax

    from easytorch.kernels.decode.pallas_kernel import block_of

    def heads(kv_heads: int, dim: int, dtype: str = "bfloat16") -> int | None:
        struct = jax.ShapeDtypeStruct((1, 4096, kv_heads, dim), dtype)
        return block_of(struct, struct)  # type: ignore[arg-type]

    assert heads(8, 64) == heads(8, 128) == 256
    assert heads(32, 128) == 128
    assert heads(8, 128, "float32") == 256
    assert heads(32, 128, "float32") is None


def test_nothing_to_see() -> None:
    import jax.numpy as jnp

    from easytorch.kernels.attention.call import AttentionCall
    from easytorch.kernels.decode.pallas_or_jax import decode

    query, empty = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 0, 2, 8))
    assert (decode(query, empty, empty, None, AttentionCall()) == 0).all()
    assert decode(query[:0], empty[:0], empty[:0], None, AttentionCall()).shape == (0, 1, 4, 8)
