"""The Pallas kernels for TPU in Pallas's interpreter, output and every gradient against the definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'easytorch[jax]'")
pytestmark = pytest.mark.jax_cpu

import jax.numpy as jnp  # noqa: E402

from easytorch.kernels.attention.call import DIFFERENTIABLE, AttentionCall, map_tensors  # noqa: E402
from easytorch.kernels.attention.contract import resolve, window_of  # noqa: E402
from easytorch.kernels.attention.pallas_flash_inputs import grid_of  # noqa: E402
from easytorch.kernels.attention.pallas_tuning import BlockSizes  # noqa: E402
from easytorch.kernels.blocksparse import native, pallas_attention, pallas_or_jax  # noqa: E402
from easytorch.kernels.blocksparse.pallas_map import walks  # noqa: E402
from easytorch.kernels.blocksparse.structure import Rule  # noqa: E402
from easytorch.operations.dispatch.check import relative_rms_error  # noqa: E402

B, T, H, K, D, DV = 2, 300, 4, 2, 16, 24


def ids(length: int) -> torch.Tensor:
    return torch.stack([torch.arange(length) // 100, torch.arange(length) // 140 % 2]).int()


def gaps() -> torch.Tensor:
    """Tiles of 128 x 128 that are empty, full and partial."""
    row, column = torch.arange(T)[:, None], torch.arange(T)
    return ((row // 128 + column // 128) % 3 != 0) & ((row < 128) | (column % 3 != 0))


CASES: dict[str, dict[str, Any]] = {
    "causal window": {"causal": True, "sliding_window": 60},
    "chunks": {"length": 70, "chunk_size": 130},
    "rows before the first key": {"length": 500, "causal": True, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "prefix of each batch": {"causal": True, "prefix_length": torch.tensor([3, 290], dtype=torch.int32)},
    "documents": {"causal": True, "query_segment_ids": ids(T), "key_segment_ids": ids(T)},
    "gaps and bias": {"mask": gaps(), "bias": torch.linspace(-2, 2, T * T).sin().reshape(1, 1, T, T)},
    "mask of the keys": {"mask": (torch.arange(T) // 128 != 1)[None, None, None], "softcap": 2.0},
    "everything": {
        "mask": gaps(), "bias": torch.linspace(-2, 2, B * T).sin().reshape(B, 1, 1, T), "causal": True,
        "sliding_window": (200, 50), "query_segment_ids": ids(T), "key_segment_ids": ids(T), "softcap": 4.0,
        "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]), "softmax_scale": 0.2, "dropout_prob": 0.1,
        "seed": torch.tensor(5, dtype=torch.int32), "chunk_size": 250,
        "prefix_length": torch.tensor([10, 200], dtype=torch.int32),
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, not square, other ones in the backward."""
    monkeypatch.setattr(pallas_attention, "forward_blocks", lambda *_: BlockSizes(128, 256))
    monkeypatch.setattr(pallas_attention, "backward_blocks", lambda *_: BlockSizes(256, 128))


def heads(length: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(length)
    return {"query": torch.randn(B, length, H, D), "key": torch.randn(B, T, K, D), "value": torch.randn(B, T, K, DV)}


def to_jax(x: torch.Tensor | None) -> Any:
    return None if x is None else jnp.asarray(x.detach().numpy())


def rule_of(features: dict[str, Any]) -> Rule:
    prefix = features.get("prefix_length")
    return Rule(
        features.get("causal", False), *window_of(features.get("sliding_window")), features.get("chunk_size"),
        True if isinstance(prefix, torch.Tensor) else prefix,
    )  # fmt: skip


def arguments_of(given: dict[str, torch.Tensor], features: dict[str, Any]) -> list[Any]:
    """query, key, value, the call and the prefix."""
    contract = {name: x for name, x in features.items() if name not in ("chunk_size", "prefix_length")}
    call = map_tensors(resolve(**given, **contract), lambda _, x: to_jax(x.int() if x.dtype == torch.int64 else x))
    prefix = features.get("prefix_length")
    call = call._replace(left=None, right=None)
    return [*map(to_jax, given.values()), call, to_jax(prefix) if isinstance(prefix, torch.Tensor) else None]


@pytest.mark.parametrize(
    ("case", "kernel"), [*((case, "pallas") for case in CASES), ("chunks", "plain jax"), ("everything", "plain jax")]
)
def test_equals_the_definition(case: str, kernel: str) -> None:
    features = dict(CASES[case])
    given = heads(features.pop("length", T))
    arguments, settings = arguments_of(given, features), {"rule": rule_of(features)}
    forward, backward = pallas_or_jax.definition_forward, pallas_or_jax.definition_backward
    if kernel == "pallas":
        forward, backward = pallas_attention.blocksparse_forward, pallas_attention.blocksparse_backward
        settings["interpret"] = True
    output, logsumexp = forward(*arguments, **settings)
    upstream = torch.linspace(-1, 1, output.size).sin().reshape(output.shape)
    grads = backward(*arguments, output, logsumexp, to_jax(upstream), **settings)

    leaves = {name: x.double().requires_grad_() for name, x in given.items()}
    leaves |= {n: features[n].double().requires_grad_() for n in ("bias", "sinks") if n in features}
    expected = native.attention(**{**features, **leaves})[0]
    wanted = torch.autograd.grad(expected, list(leaves.values()), upstream.double())
    got = {**dict(zip(("query", "key", "value", *DIFFERENTIABLE), grads, strict=True)), "output": output}
    for name, want in {**dict(zip(leaves, wanted, strict=True)), "output": expected}.items():
        error = relative_rms_error(torch.from_numpy(np.array(got[name])), want)
        assert error <= 1e-5, f"{name}: relative RMS error {error:.2e}"


def test_half_precision() -> None:
    features = {"causal": True, "sliding_window": 60}
    given = {name: x.bfloat16() for name, x in heads(T).items()}
    arrays = [jnp.asarray(x.float().numpy(), jnp.bfloat16) for x in given.values()]
    call = AttentionCall(scale=D**-0.5)
    output, _ = pallas_attention.blocksparse_forward(*arrays, call, None, interpret=True, rule=rule_of(features))
    expected = native.attention(**{n: x.double() for n, x in given.items()}, **features)[0]
    assert relative_rms_error(torch.from_numpy(np.array(output.astype(jnp.float32))), expected) <= 8e-3


def _walk(features: dict[str, Any], by_columns: bool, length: int = 1024) -> tuple[Any, np.ndarray]:
    query, key = jnp.zeros((1, length, 1, 8)), jnp.zeros((1, 1024, 1, 8))
    n, rule = grid_of(query, key, BlockSizes(128, 128)), rule_of(features)
    begin, end = pallas_attention.intervals_of(n, rule, None)
    matrix = features.get("mask")
    given = [to_jax(x) for x in (matrix, features.get("query_segment_ids"), features.get("key_segment_ids"))]
    walk = walks(n, rule, begin, end, *given, by_columns=by_columns)
    return walk, np.array(walk.tiles)[0]


@pytest.mark.parametrize(
    ("features", "steps", "needed", "full"),
    [
        ({"causal": True}, 36, 36, 28),
        ({"causal": True, "sliding_window": 257}, 21, 21, 7),
        ({"causal": True, "chunk_size": 256}, 12, 12, 4),
        ({"sliding_window": (0, 0)}, 8, 8, 0),
        ({"causal": True, "prefix_length": 256}, 37, 37, 31),
        ({"mask": torch.arange(1024)[None, None, None] < 128}, 64, 8, 8),
        (dict.fromkeys(("query_segment_ids", "key_segment_ids"), torch.arange(1024)[None].int() // 512), 64, 32, 32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by_columns", [False, True])
def test_only_what_is_seen_is_a_step(
    features: dict[str, Any], steps: int, needed: int, full: int, by_columns: bool
) -> None:
    walk, tiles = _walk(features, by_columns)
    # a mask of the keys leaves columns without any row, which stay a step each
    assert walk.steps == steps
    assert ((tiles & 3) != 0).sum() == needed
    assert ((tiles & 3) == 2).sum() == full
    # an empty step fetches what was fetched before it
    moved = np.diff(tiles >> 2) != 0
    assert not (moved & ((tiles[1:] & 3) == 0)).any()
    assert (np.diff(np.array(walk.owners)[1:-1]) >= 0).all()


def test_unseen_keys_are_never_read() -> None:
    """NaN in whole tiles that nothing sees, in the forward's tiles and the backward's: it would spread."""
    features = {"mask": torch.arange(T) < 256, "sliding_window": (299, 299)}
    given = heads(T)
    for name in ("key", "value"):
        given[name][:, 256:] = torch.nan
    arguments, settings = arguments_of(given, features), {"rule": rule_of(features)}
    output, logsumexp = pallas_attention.blocksparse_forward(*arguments, **settings, interpret=True)
    grads = pallas_attention.blocksparse_backward(*arguments, output, logsumexp, output, **settings, interpret=True)
    assert all(bool(jnp.isfinite(x).all()) for x in (output, *grads[:3]))
