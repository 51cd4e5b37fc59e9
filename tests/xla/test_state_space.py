"""The operations with a state on the xla device: outputs, states and every gradient, against the definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_xla", reason="torch_xla has an environment of its own: scripts/test_xla.sh")

from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error

r = torch.randn


def arguments(name, length, batch=2):
    torch.manual_seed(length)
    b, t = batch, length
    if name == "causal_conv1d":
        return {"x": r(b, t, 20), "weight": r(20, 4), "bias": r(20), "initial_state": r(b, 20, 3), "activation": "silu"}
    if name == "ssm1":
        return {
            "x": r(b, t, 30), "dt": r(b, t, 30), "A": -r(30, 5).exp(), "B": r(b, t, 5), "C": r(b, t, 5), "D": r(30),
            "z": r(b, t, 30), "dt_bias": r(30), "initial_state": r(b, 30, 5), "dt_softplus": True,
        }  # fmt: skip
    if name == "ssm2":
        return {
            "x": r(b, t, 6, 10), "dt": r(b, t, 6), "A": -r(6).exp(), "B": r(b, t, 2, 7), "C": r(b, t, 2, 7),
            "D": r(6, 10), "z": r(b, t, 6, 10), "dt_bias": r(6), "initial_state": r(b, 6, 10, 7), "dt_softplus": True,
        }  # fmt: skip
    return {
        "query": r(b, t, 2, 12), "key": r(b, t, 2, 12), "value": r(b, t, 6, 10), "g": -r(b, t, 6).exp(),
        "beta": r(b, t, 6).sigmoid(), "initial_state": r(b, 6, 12, 10), "use_qk_l2norm": True,
    }  # fmt: skip


def with_documents(given):
    given["segment_ids"] = (torch.rand(2, 150) < 0.1).cumsum(1)
    return given


def results(name, given, backend=None):
    run = OperationRegistry.create(name, OperationMetadata(backend=backend))
    leaves = {n: v.detach().requires_grad_() for n, v in given.items() if torch.is_tensor(v) and v.is_floating_point()}
    result = run(**{**given, **leaves})
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(t.shape, generator=generator).to(t) for t in (result.outputs, result.final_state)]
    grads = torch.autograd.grad((result.outputs, result.final_state), list(leaves.values()), upstream)
    return {"outputs": result.outputs, "state": result.final_state, **dict(zip(leaves, grads, strict=True))}


def assert_matches(name, given):
    # first: autograd counts the devices when it first runs, and would miss the xla device after a run on the CPU
    got = results(name, {n: v.to("xla") if torch.is_tensor(v) else v for n, v in given.items()})
    wide = {n: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in given.items()}
    expected = results(name, wide, "native")
    for field, value in got.items():
        error = relative_rms_error(value.cpu(), expected[field])
        assert error <= 1e-5, f"{field}: relative RMS error {error:.2e}"


@pytest.mark.parametrize("name", ["ssm1", "ssm2", "gated_delta_rule"])
def test_values_and_every_gradient(name):
    assert_matches(name, arguments(name, 1))
    assert_matches(name, with_documents(arguments(name, 150)))


def test_the_convolution_is_left_to_xla():
    assert_matches(
        "causal_conv1d", {**arguments("causal_conv1d", 30), "segment_ids": torch.arange(60).view(2, 30) // 7}
    )


@pytest.mark.parametrize(("name", "decay"), [("ssm1", "A"), ("ssm2", "A"), ("gated_delta_rule", "g")])
def test_strong_decays_among_weak_ones(name, decay):
    given = with_documents(arguments(name, 150))  # shapes that are compiled already
    given[decay] = torch.where(torch.rand(given[decay].shape) < 0.5, -1e4, 0.01 * given[decay])
    assert_matches(name, given)


@pytest.mark.parametrize("name", ["ssm1", "ssm2", "gated_delta_rule"])
def test_float64_takes_the_definition(name):
    args = tuple(x.double() for x in OperationRegistry.get(name).typical_call()[0])
    assert OperationRegistry.create(name).choose_on("tpu", args, {}).backend == "native"
    assert OperationRegistry.create(name).choose_on("tpu", *OperationRegistry.get(name).typical_call()).backend == "xla"
