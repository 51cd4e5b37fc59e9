"""The Triton kernels with a state against their definitions in float64: outputs, states and every gradient, on a GPU.

Under TRITON_INTERPRET=1 the same cases run on the CPU; test_triton.py does that in a process of its own.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
OPERATIONS = ["causal_conv1d", "ssm1", "ssm2", "gated_delta_rule"]
OPTIONAL = {"bias", "initial_state", "activation", "D", "z", "dt_bias", "dt_softplus", "dt_limit", "use_qk_l2norm"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.usefixtures("poisoned_empty"),
]


def arguments(name: str, length: int, batch: int = 2) -> dict[str, Any]:
    """Every argument of the operation, of odd sizes."""
    torch.manual_seed(length)
    r, b, t = functools.partial(torch.randn, device=DEVICE), batch, length
    ids = (torch.rand(b, t, device=DEVICE) < 0.12).cumsum(1)
    if name == "causal_conv1d":
        given = {"x": r(b, t, 20), "weight": r(20, 4), "bias": r(20), "initial_state": r(b, 20, 3)}
        return {**given, "activation": "silu", "segment_ids": ids}
    if name == "ssm1":
        given = {
            "x": r(b, t, 30), "dt": r(b, t, 30), "A": -r(30, 5).exp(), "B": r(b, t, 5), "C": r(b, t, 5), "D": r(30),
            "z": r(b, t, 30), "dt_bias": r(30), "initial_state": r(b, 30, 5),
        }  # fmt: skip
        return {**given, "dt_softplus": True, "segment_ids": ids}
    if name == "ssm2":
        given = {
            "x": r(b, t, 4, 10), "dt": r(b, t, 4), "A": -r(4).exp(), "B": r(b, t, 2, 7), "C": r(b, t, 2, 7),
            "D": r(4, 10), "z": r(b, t, 4, 10), "dt_bias": r(4), "initial_state": r(b, 4, 10, 7),
        }  # fmt: skip
        return {**given, "dt_softplus": True, "dt_limit": (0.01, 2.5), "segment_ids": ids}
    given = {
        "query": r(b, t, 2, 12), "key": r(b, t, 2, 12), "value": r(b, t, 4, 10), "g": -r(b, t, 4).exp(),
        "beta": r(b, t, 4).sigmoid(), "initial_state": r(b, 4, 12, 10),
    }  # fmt: skip
    return {**given, "use_qk_l2norm": True, "segment_ids": ids}


def module(name: str, path: str) -> Any:
    return getattr(importlib.import_module(f"easytorch.kernels.{name}.{path}"), name)


def floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def results(function: Any, given: dict[str, Any], dtype: torch.dtype, numbers: torch.dtype) -> dict[str, Tensor]:
    leaves = {n: v.to(numbers).to(dtype).requires_grad_() for n, v in given.items() if floating(v)}
    outputs, state = function(**{**given, **leaves})
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(t.shape, generator=generator).to(numbers).to(t) for t in (outputs, state)]
    grads = torch.autograd.grad((outputs, state), list(leaves.values()), upstream)
    return {"outputs": outputs, "final_state": state, **dict(zip(leaves, grads, strict=True))}


def assert_matches(name: str, given: dict[str, Any], dtype: torch.dtype) -> None:
    expected = results(module(name, "native"), given, torch.float64, dtype)
    for field, got in results(module(name, "triton_op"), given, dtype, dtype).items():
        want = expected[field]
        assert got.shape == want.shape and got.isfinite().all(), field
        if want.numel() == 0:
            continue
        difference, scale = ((t.double()).square().mean().sqrt() for t in (got - want, want))
        allowed = TOLERANCE[dtype] * (1 if field in ("outputs", "final_state") or dtype == torch.float32 else 2)
        assert difference <= allowed * scale, f"{field}: relative RMS error {float(difference / scale):.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_every_gradient(name: str, dtype: torch.dtype) -> None:
    assert_matches(name, arguments(name, 70), dtype)


@pytest.mark.parametrize("length", [1, 2, 63, 64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_lengths_without_what_is_optional(name: str, length: int) -> None:
    given = {n: v for n, v in arguments(name, length, 1).items() if n not in (*OPTIONAL, "segment_ids")}
    if "key" in given:
        given["key"] = torch.nn.functional.normalize(given["key"], dim=-1)
    if "dt" in given:
        given["dt"] = given["dt"].abs()
    assert_matches(name, given, torch.float32)


@pytest.mark.parametrize(("name", "decay"), [("ssm1", "A"), ("ssm2", "A"), ("gated_delta_rule", "g")])
@pytest.mark.parametrize("strength", [0.0, 40.0, 1e4])
def test_decays_of_any_strength(name: str, decay: str, strength: float) -> None:
    given = arguments(name, 70, 1)
    given[decay] = torch.where(torch.rand_like(given[decay]) < 0.5, -strength, 0.01 * given[decay])
    del given["segment_ids"]
    assert_matches(name, given, torch.float32)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_widths_of_the_convolution(width: int) -> None:
    given = arguments("causal_conv1d", 40)
    given |= {"weight": given["weight"][:, :width], "initial_state": given["initial_state"][..., : width - 1]}
    assert_matches("causal_conv1d", given, torch.float32)
    given |= {"activation": None, "x": given["x"].transpose(1, 2).contiguous().transpose(1, 2)}
    assert_matches("causal_conv1d", given, torch.float32)


def test_the_same_key_again_and_again() -> None:
    key = torch.ones(1, 70, 1, 16, device=DEVICE) / 4
    value, ones = torch.randn(1, 70, 1, 4, device=DEVICE), torch.ones(1, 70, 1, device=DEVICE)
    outputs, _ = module("gated_delta_rule", "triton_op")(key, key, value, 0 * ones, ones, 1.0)
    torch.testing.assert_close(outputs, value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiles_to_one_graph_with_its_gradient(name: str) -> None:
    given, run = arguments(name, 20, 1), module(name, "triton_op")
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got, want = (results(function, given, torch.float32, torch.float32) for function in (compiled, run))
    for field in want:
        torch.testing.assert_close(got[field], want[field], rtol=1e-4, atol=1e-5)


def test_operators_pass_opcheck() -> None:
    for name in OPERATIONS:
        module(name, "triton_op")
    r, ops = functools.partial(torch.randn, device=DEVICE), torch.ops.easytorch
    number = (torch.rand(1, 9, device=DEVICE) < 0.2).cumsum(1).to(torch.int32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")

    def check(operator: Any, *inputs: Any) -> None:
        given = tuple(x.requires_grad_() if floating(x) else x for x in inputs)
        torch.library.opcheck(operator.default, given, test_utils=checks)

    check(ops.triton_causal_conv1d, r(1, 9, 6), r(6, 3), None, r(1, 6, 2), number, True)
    step, A, B = r(1, 9, 6).abs(), -r(1, 3, 6).exp(), r(1, 9, 3)
    check(ops.triton_ssm1_scan, step, r(1, 9, 6), A, B, r(1, 9, 3), r(1, 3, 6), None)
    step, A, B = r(1, 9, 2).abs(), -r(2).exp(), r(1, 9, 1, 3)
    check(ops.triton_ssm2, r(1, 9, 2, 4), step, A, B, r(1, 9, 1, 3), r(1, 2, 4, 3), number)
    query, g, beta = r(1, 9, 1, 4), -r(1, 9, 2).exp(), r(1, 9, 2).sigmoid()
    check(ops.triton_gated_delta_rule, query, r(1, 9, 1, 4), r(1, 9, 2, 3), g, beta, r(1, 2, 4, 3), number)


@pytest.mark.skipif(INTERPRETED, reason="minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_model_sizes(dtype: torch.dtype) -> None:
    r = functools.partial(torch.randn, device=DEVICE)
    x = r(1, 500, 24, 64)
    given = {"x": x, "dt": r(1, 500, 24), "A": -r(24).exp(), "B": r(1, 500, 1, 128), "C": r(1, 500, 1, 128)}
    assert_matches("ssm2", {**given, "dt_softplus": True}, dtype)
    key, value = r(1, 500, 4, 128), r(1, 500, 8, 128)
    given = {"query": r(1, 500, 4, 128), "key": key, "value": value, "g": -r(1, 500, 8).exp()}
    assert_matches("gated_delta_rule", {**given, "beta": r(1, 500, 8).sigmoid(), "use_qk_l2norm": True}, dtype)
