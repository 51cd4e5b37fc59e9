"""Every implementation of attention x feature x dtype x odd shapes: output and every gradient against the definition.

The definition is native.attention in float64 on the same (rounded) inputs. A new implementation adds a line to
IMPLEMENTATIONS, and to REFUSED what it must refuse; a new feature adds a line to CASES.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_map_only

from easytorch.kernels.attention import native
from easytorch.operations import OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import relative_rms_error


class Shape(NamedTuple):
    batch: int = 2
    length: int = 63
    keys: int = 63
    heads: int = 6
    kv_heads: int = 2
    dim: int = 60
    value_dim: int = 60


def _mask(shape: Shape) -> torch.Tensor:
    """Random, with one row of every head and one whole head that see nothing."""
    mask = torch.rand(shape.batch, shape.heads, shape.length, shape.keys) > 0.4
    mask[:, :, 5] = False
    mask[0, 1] = False
    return mask


def _segments(shape: Shape) -> dict[str, torch.Tensor]:
    """Documents of 20 tokens; segment 9 of the second batch is asked for by a query and held by no key."""
    query = torch.arange(shape.length).div(20, rounding_mode="floor").repeat(shape.batch, 1)
    key = torch.arange(shape.keys).div(20, rounding_mode="floor").repeat(shape.batch, 1)
    query[1, 3] = 9
    return {"query_segment_ids": query, "key_segment_ids": key}


LONGER, SHORTER = Shape(length=63, keys=301), Shape(length=301, keys=63)

# name -> shape, and the features for it
CASES: dict[str, tuple[Shape, Any]] = {
    "plain": (Shape(), lambda s: {}),
    "causal": (Shape(), lambda s: {"causal": True}),
    "mha": (Shape(heads=3, kv_heads=3), lambda s: {"causal": True}),
    "mqa": (Shape(kv_heads=1, dim=32, value_dim=32), lambda s: {}),
    "value_dim": (Shape(value_dim=36), lambda s: {"causal": True}),
    "one_query": (Shape(length=1, keys=150), lambda s: {"causal": True}),
    "more_keys": (LONGER, lambda s: {"causal": True}),
    "more_queries": (SHORTER, lambda s: {"causal": True}),  # the first rows see nothing
    "scale": (Shape(), lambda s: {"softmax_scale": 0.37}),
    "mask": (Shape(), lambda s: {"mask": _mask(s)}),
    "mask_broadcast": (LONGER, lambda s: {"mask": torch.rand(s.batch, 1, 1, s.keys) > 0.5}),
    "mask_2d": (SHORTER, lambda s: {"mask": torch.rand(s.length, s.keys) > 0.5, "causal": True}),
    "bias": (Shape(), lambda s: {"bias": torch.randn(s.batch, s.heads, s.length, s.keys)}),
    "bias_heads": (LONGER, lambda s: {"bias": torch.randn(1, s.heads, s.length, s.keys), "causal": True}),
    "bias_keys": (SHORTER, lambda s: {"bias": torch.randn(s.batch, 1, 1, s.keys)}),
    "bias_hides": (Shape(), lambda s: {"bias": torch.zeros(_mask(s).shape).masked_fill(~_mask(s), float("-inf"))}),
    "segments": (Shape(), _segments),
    "segments_causal": (LONGER, lambda s: {**_segments(s), "causal": True}),
    "window": (Shape(), lambda s: {"sliding_window": 7, "causal": True}),
    "window_sides": (LONGER, lambda s: {"sliding_window": (20, 3)}),
    "window_left": (SHORTER, lambda s: {"sliding_window": (40, None)}),
    "softcap": (Shape(), lambda s: {"softcap": 1.5}),
    "sinks": (Shape(), lambda s: {"sinks": torch.randn(s.heads), "mask": _mask(s)}),
    "dropout": (Shape(), lambda s: {"dropout_prob": 0.25, "seed": 2**40 + 17}),
    "everything": (
        Shape(length=150, keys=170, value_dim=36),
        lambda s: {
            **_segments(s), "mask": _mask(s), "bias": torch.randn(1, s.heads, s.length, s.keys), "causal": True,
            "sliding_window": (90, None), "softcap": 4.0, "sinks": torch.randn(s.heads), "softmax_scale": 0.2,
            "dropout_prob": 0.1, "seed": 5,
        },
    ),
}  # fmt: skip

# what metadata.backend is set to -> the cases it refuses
IMPLEMENTATIONS: dict[str, frozenset[str]] = {
    "vanilla": frozenset(),
    "sdpa": frozenset({"softcap", "sinks", "dropout", "everything"}),
    "flash:native": frozenset(),
    "flash:aten": frozenset(),
    "flash:xla": frozenset(),
    "blocksparse:native": frozenset(),
    "blocksparse:aten": frozenset(),
}

# the same on a GPU, where bfloat16 is the everyday dtype: every case in every dtype
GPU_IMPLEMENTATIONS: dict[str, frozenset[str]] = {
    "vanilla": frozenset(),
    "sdpa": IMPLEMENTATIONS["sdpa"],
    "flash:native": frozenset(),
    "flash:triton": frozenset(),
    "blocksparse:triton": frozenset(),
}

# output, gradients. In half precision a gradient passes two roundings (the output's gradient and the score's): twice
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (1e-3, 2e-3), torch.bfloat16: (8e-3, 1.6e-2)}
SEES_NOTHING = ("mask", "more_queries", "bias_hides", "segments", "sinks")  # cases with a row whose output is zero
HALF_CASES = ("causal", "bias", "everything")
NO_GPU = "needs a CUDA or ROCm device"


def _rows() -> list[Any]:
    rows = []
    for device, implementations in (("cpu", IMPLEMENTATIONS), ("cuda", GPU_IMPLEMENTATIONS)):
        for implementation, case, dtype in itertools.product(implementations, CASES, TOLERANCE):
            # every row of flash:xla is a program to compile, seconds each
            half_cases = HALF_CASES[:1] if implementation == "flash:xla" else HALF_CASES
            if device == "cpu" and dtype != torch.float32 and case not in half_cases:
                continue
            marks = [pytest.mark.jax_cpu] if implementation == "flash:xla" else []
            if device == "cuda":
                marks = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)]
            name = f"{implementation}-{case}-{str(dtype).removeprefix('torch.')}-{device}"
            rows.append(pytest.param(device, implementation, case, dtype, marks=marks, id=name))
    return rows


@pytest.fixture(autouse=True)
def poisoned_empty() -> Any:
    """torch.empty gives NaN: what an implementation forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


def _inputs(case: str) -> tuple[list[torch.Tensor], dict[str, Any], torch.Tensor]:
    torch.manual_seed(sum(map(ord, case)))
    shape, features = CASES[case]
    b, t, s, h, k, d, dv = shape
    tensors = [torch.randn(b, t, h, d), torch.randn(b, s, k, d), torch.randn(b, s, k, dv)]
    return tensors, features(shape), torch.randn(b, t, h, dv)


def _run(
    function: Any, case: str, rounded: torch.dtype, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Output and gradients of `function` in `dtype` on `device`, on inputs rounded to `rounded`; back on the CPU."""
    tensors, features, grad = tree_map_only(torch.Tensor, lambda x: x.to(device), _inputs(case))
    leaves = dict(zip(("query", "key", "value"), tensors, strict=True))
    leaves |= {name: features.pop(name) for name in ("bias", "sinks") if name in features}
    leaves = {name: x.to(rounded).to(dtype).requires_grad_() for name, x in leaves.items()}
    output = function(**leaves, **features)
    output, weights = output if isinstance(output, tuple) else (output.attention_outputs, None)
    assert output.dtype == dtype
    gradients = torch.autograd.grad(output, list(leaves.values()), grad.to(rounded).to(dtype))
    result = {"output": output, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}
    if weights is not None:
        result["weights"] = weights
    return {name: x.cpu() for name, x in result.items()}


@pytest.mark.parametrize(("device", "implementation", "case", "dtype"), _rows())
def test_equals_the_definition(device: str, implementation: str, case: str, dtype: torch.dtype) -> None:
    if implementation == "flash:xla":
        pytest.importorskip("jax", reason="jax is not installed: pip install 'easytorch[jax]'")
    attention = OperationRegistry.create("attention", OperationMetadata(backend=implementation))
    if case in (IMPLEMENTATIONS | GPU_IMPLEMENTATIONS)[implementation]:
        with pytest.raises(UnsupportedOperationError, match=r"ATen|it does not carry"):
            _run(attention, case, dtype, dtype, device)
        return
    got, expected = _run(attention, case, dtype, dtype, device), _run(native.attention, case, dtype, torch.float64)
    for name, tolerance in zip(got, (TOLERANCE[dtype][0], *[TOLERANCE[dtype][1]] * len(got)), strict=False):
        error = relative_rms_error(got[name], expected[name])
        assert error <= tolerance, f"{name}: relative RMS error {error:.2e}, allowed {tolerance:.0e}"
    if case in SEES_NOTHING:
        empty = (expected["weights"].sum(-1) == 0).transpose(1, 2)  # (B, T, H)
        assert empty.any(), "the case must have a row that sees nothing"
        assert (got["output"][empty] == 0).all()
