"""`flash` over packed sequences: each sequence against the float64 definition of attention for it alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from easytorch.kernels.attention import blocked, native, varlen
from easytorch.kernels.attention.contract import band_of
from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error

HEADS, KV_HEADS, DIM = 6, 2, 20
# lengths of queries and keys: equal, longer, shorter and absent ones
ALIKE = ([5, 17, 1, 0, 40], [5, 17, 1, 0, 40])
MIXED = ([5, 17, 1, 0, 12, 3], [9, 17, 30, 4, 0, 2])
UNEVEN = ([64] + [1] * 20, [64] + [2] * 20)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": 4},
    "sides": {"sliding_window": (3, 2)},
    "everything": {"causal": True, "sliding_window": (9, None), "softcap": 2.0, "sinks": True, "softmax_scale": 0.3},
}


def ends_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(lengths: tuple[list[int], list[int]], features: dict[str, Any], extra: int = 0) -> tuple[dict, dict]:
    generator = torch.Generator().manual_seed(7)
    rows, columns = (sum(x) + extra for x in lengths)
    tensors = {
        name: torch.randn(tokens, heads, DIM, generator=generator)
        for name, tokens, heads in (("query", rows, HEADS), ("key", columns, KV_HEADS), ("value", columns, KV_HEADS))
    }
    features = dict(features)
    if features.pop("sinks", False):
        tensors["sinks"] = torch.randn(HEADS, generator=generator)
    return tensors, features


def one_by_one(lengths: tuple[list[int], list[int]], query, key, value, **features) -> torch.Tensor:
    outputs, row, column = [], 0, 0
    for rows, columns in zip(*lengths, strict=True):
        own = (x[None, column : column + columns] for x in (key, value))
        outputs.append(native.attention(query[None, row : row + rows], *own, **features)[0][0])
        row, column = row + rows, column + columns
    outputs.append(torch.zeros(len(query) - row, HEADS, DIM, dtype=query.dtype))
    return torch.cat(outputs)


def run(function: Any, tensors: dict, features: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    leaves = {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}
    output = function(**leaves, **features)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return {
        "output": output,
        **dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), grad), strict=True)),
    }


def assert_close(got: dict, want: dict, tolerance: float = 1e-5) -> None:
    for name in want:
        assert relative_rms_error(got[name], want[name]) <= tolerance, name


# jax compiles for each shape: two of them say enough
ROWS = [("native", lengths, name) for lengths in (ALIKE, MIXED, UNEVEN) for name in FEATURES]
ROWS += [pytest.param("xla", ALIKE, "causal", marks=pytest.mark.jax_cpu)]
ROWS += [pytest.param("xla", MIXED, "everything", marks=pytest.mark.jax_cpu)]


@pytest.mark.parametrize(("backend", "lengths", "features"), ROWS)
def test_each_sequence_attends_to_itself(backend, lengths, features):
    if backend == "xla":
        pytest.importorskip("jax", reason="jax is not installed: pip install 'easytorch[jax]'")
    flash = OperationRegistry.create("flash", OperationMetadata(backend=backend))
    ends = {"cu_seqlens_q": ends_of(lengths[0]), "cu_seqlens_k": ends_of(lengths[1])}
    tensors, settings = inputs(lengths, FEATURES[features])
    got = run(lambda **x: flash(**x, **ends).attention_outputs, tensors, settings, torch.float32)
    assert_close(got, run(lambda **x: one_by_one(lengths, **x), tensors, settings, torch.float64))


def carried(query, key, value, **features):
    """blocked.attention under another name: varlen's own ways are taken, not the loop."""
    return blocked.attention(query, key, value, **features)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("lengths", [ALIKE, MIXED, UNEVEN], ids=["alike", "mixed", "uneven"])
@pytest.mark.parametrize("known", ["host", "device", "longest"])
def test_every_way_is_exact(lengths, features, known, monkeypatch):
    """In float64, with tokens beyond the last sequence; as on a device, where the lengths are not known, too."""
    ends = {"cu_seqlens_q": ends_of(lengths[0]), "cu_seqlens_k": ends_of(lengths[1])}
    if known == "longest":
        ends |= {"max_seqlen_q": 70, "max_seqlen_k": 65}
    if known != "host":
        check = varlen._check
        monkeypatch.setattr(varlen, "_check", lambda *arguments: check(*arguments) and None)
    tensors, settings = inputs(lengths, FEATURES[features], extra=3)
    packed = {name: x[None] if x.dim() == 3 else x for name, x in tensors.items()}
    got = run(lambda **x: varlen.attention(carried, **x, **ends), packed, settings, torch.float64)
    for name in ("output", "query", "key", "value"):
        got[name] = got[name][0]
    want = run(lambda **x: one_by_one(lengths, **x), tensors, settings, torch.float64)
    assert (got["output"][-3:] == 0).all()
    assert_close(got, want, 1e-12)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("lengths", [ALIKE, MIXED, UNEVEN], ids=["alike", "mixed", "uneven"])
@pytest.mark.parametrize("extra", [0, 3])
def test_dropout_is_a_function_of_the_packed_places(lengths, features, extra):
    """In float64, every gradient too: a weight at the edge of what a row sees is one of a few, and is not lost."""
    flash = OperationRegistry.create("flash", OperationMetadata(backend="native"))
    ends = {"cu_seqlens_q": ends_of(lengths[0]), "cu_seqlens_k": ends_of(lengths[1])}
    tensors, settings = inputs(lengths, FEATURES[features], extra)
    settings |= {"dropout_prob": 0.4, "seed": 5}
    mask = torch.zeros(sum(lengths[0]) + extra, sum(lengths[1]) + extra, dtype=torch.bool)
    row = column = 0
    left, right = band_of(settings.get("causal", False), settings.get("sliding_window"))
    for rows, columns in zip(*lengths, strict=True):
        for i, j in itertools.product(range(rows), range(columns)):
            offset = j - (i + columns - rows)
            mask[row + i, column + j] = (left is None or offset >= -left) and (right is None or offset <= right)
        row, column = row + rows, column + columns
    plain = {name: x for name, x in settings.items() if name not in ("causal", "sliding_window")}

    def definition(query, key, value, **features):
        return native.attention(query[None], key[None], value[None], mask=mask, **features)[0][0]

    got = run(lambda **x: flash(**x, **ends).attention_outputs, tensors, settings, torch.float64)
    assert_close(got, run(definition, tensors, plain, torch.float64), 1e-12)


def test_the_call_of_flash_attn():
    flash = OperationRegistry.create("flash", OperationMetadata(backend="native"))
    tensors, _ = inputs(MIXED, {})
    ends = ends_of(MIXED[0]), ends_of(MIXED[1])
    got = flash.varlen(*tensors.values(), *ends, max(MIXED[0]), max(MIXED[1]), causal=True, softmax_scale=0.5)
    want = one_by_one(MIXED, **{k: v.double() for k, v in tensors.items()}, causal=True, softmax_scale=0.5)
    assert relative_rms_error(got.attention_outputs, want) < 1e-5
    # flash-attn's dropout is its own argument: the metadata's is that of the other calls
    dropping = OperationRegistry.create("flash", OperationMetadata(backend="native", dropout_prob=0.9))
    settled = dropping.varlen(*tensors.values(), *ends, causal=True, softmax_scale=0.5)
    torch.testing.assert_close(settled.attention_outputs, got.attention_outputs)


def test_compiled_without_graph_breaks():
    flash = OperationRegistry.create("flash", OperationMetadata(backend="native"))
    tensors, _ = inputs(MIXED, {})

    def call(query, key, value, q, k):
        return flash.varlen(query, key, value, q, k, 17, 30, causal=True).attention_outputs

    ends = ends_of(MIXED[0]), ends_of(MIXED[1])
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors.values(), *ends), call(*tensors.values(), *ends))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_k": None}, "cu_seqlens_k must be an integer tensor"),
        ({"cu_seqlens_q": torch.tensor([0.0, 5.0])}, "cu_seqlens_q must be an integer tensor"),
        ({"cu_seqlens_q": torch.tensor([0, 3])}, "cu_seqlens_q has 1 sequences"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 3])}, "must rise from 0"),
        ({"cu_seqlens_k": torch.tensor([0, 4, 30])}, "at most the 9 tokens"),
        ({"max_seqlen_q": 2}, "max_seqlen_q is 2, but the longest of cu_seqlens_q is 5"),
        ({"mask": torch.ones(9, 9, dtype=torch.bool)}, "mask must be None"),
        ({"query": torch.ones(2, 9, 6, 20)}, "packed in one row"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    flash = OperationRegistry.create("flash", OperationMetadata(backend="native"))
    tensors, _ = inputs(([4, 5], [4, 5]), {})
    ends = ends_of([4, 5])
    call = {**{k: v[None] for k, v in tensors.items()}, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    with pytest.raises(ValueError, match=message):
        flash(**{**call, **change})
