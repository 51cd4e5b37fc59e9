"""The operations with a recurrent state, held to one contract: values, gradients, states, documents, transforms."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from easytorch.kernels.causal_conv1d import native as conv_native
from easytorch.kernels.cpu import library
from easytorch.kernels.gated_delta_rule import native as delta_native
from easytorch.kernels.ssm1 import native as ssm1_native
from easytorch.kernels.ssm2 import native as ssm2_native
from easytorch.operations import OperationImpl, OperationMetadata, OperationRegistry, StateSpaceOutput
from easytorch.operations.dispatch.check import TOLERANCE, relative_rms_error
from easytorch.operations.dispatch.platform import PLATFORMS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORCED = ["native", "aten"]
# the gradients of the operators in C++ that have one: tests/kernels/recurrence/test_cpu_gradient.py
FORWARD = [*FORCED, *(["cpu"] if library.missing() is None else [])]
CHANNELS = "gated_delta_rule by channel"  # with a decay for each channel of a key
DEFINITION = {
    "causal_conv1d": conv_native.causal_conv1d,
    "ssm1": ssm1_native.ssm1,
    "ssm2": ssm2_native.ssm2,
    "gated_delta_rule": delta_native.gated_delta_rule,
}
OPERATIONS = list(DEFINITION)
DEFINITION[CHANNELS] = delta_native.gated_delta_rule
CASES = list(DEFINITION)
# the operators in C++ take one decay a head
CASES_FORWARD = [(name, forced) for name in CASES for forced in FORWARD if (name, forced) != (CHANNELS, "cpu")]
# the arguments that run along the sequence
ALONG = {"x", "dt", "B", "C", "z", "query", "key", "value", "g", "beta", "segment_ids"}
Arguments = dict[str, Any]


def arguments(name: str, length: int, batch: int = 2) -> Arguments:
    """Every argument of the operation, of odd sizes."""
    r = functools.partial(torch.randn, generator=torch.Generator().manual_seed(length))
    b, t = batch, length
    if name == "causal_conv1d":
        given = {"x": r(b, t, 20), "weight": r(20, 4), "bias": r(20), "initial_state": r(b, 20, 3)}
        return {**given, "activation": "silu"}
    if name == "ssm1":
        given = {
            "x": r(b, t, 30), "dt": r(b, t, 30), "A": -r(30, 5).exp(), "B": r(b, t, 5), "C": r(b, t, 5), "D": r(30),
            "z": r(b, t, 30), "dt_bias": r(30), "initial_state": r(b, 30, 5),
        }  # fmt: skip
        return {**given, "dt_softplus": True}
    if name == "ssm2":
        given = {
            "x": r(b, t, 6, 10), "dt": r(b, t, 6), "A": -r(6).exp(), "B": r(b, t, 2, 7), "C": r(b, t, 2, 7),
            "D": r(6, 10), "z": r(b, t, 6, 10), "dt_bias": r(6), "initial_state": r(b, 6, 10, 7),
        }  # fmt: skip
        return {**given, "dt_softplus": True, "dt_limit": (0.01, 2.5)}
    given = {
        "query": r(b, t, 2, 12), "key": r(b, t, 2, 12), "value": r(b, t, 6, 10), "g": -r(b, t, 6).exp(),
        "beta": r(b, t, 6).sigmoid(), "initial_state": r(b, 6, 12, 10),
    }  # fmt: skip
    if name == CHANNELS:
        given["g"] = -r(b, t, 6, 12).exp()
    return {**given, "use_qk_l2norm": True}


def segments(length: int, batch: int = 2) -> Tensor:
    """Documents of about nine tokens; the ids of the second sequence return."""
    generator = torch.Generator().manual_seed(length)
    ids = (torch.rand(batch, length, generator=generator) < 0.12).cumsum(1)
    ids[1:] %= 2
    return ids


def part(given: Arguments, start: int, stop: int) -> Arguments:
    """The tokens start..stop."""
    return {n: v[:, start:stop] if n in ALONG and v is not None else v for n, v in given.items()}


def floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def operation(name: str, backend: str | None = None) -> OperationImpl:
    return OperationRegistry.create(name.split()[0], OperationMetadata(backend=backend))


def results(function: Any, given: Arguments, dtype: torch.dtype, numbers: torch.dtype) -> dict[str, Tensor]:
    """Outputs, final state and the gradient of every floating tensor; inputs are `given`'s numbers in `numbers`."""
    leaves = {n: v.to(numbers).to(dtype).requires_grad_() for n, v in given.items() if floating(v)}
    result = function(**{**given, **leaves})
    outputs, state = (result.outputs, result.final_state) if isinstance(result, StateSpaceOutput) else result
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(t.shape, generator=generator).to(numbers).to(t.dtype) for t in (outputs, state)]
    grads = torch.autograd.grad((outputs, state), list(leaves.values()), upstream)
    return {"outputs": outputs, "final_state": state, **dict(zip(leaves, grads, strict=True))}


def assert_matches_definition(name: str, forced: str | None, given: Arguments, dtype: torch.dtype) -> None:
    expected = results(DEFINITION[name], given, torch.float64, dtype)
    for field, got in results(operation(name, forced), given, dtype, dtype).items():
        want = expected[field]
        assert got.isfinite().all(), field
        assert got.dtype == (torch.float32 if field == "final_state" else dtype)
        allowed = TOLERANCE[dtype] * (1 if field in ("outputs", "final_state") or dtype == torch.float32 else 2)
        error = relative_rms_error(got, want)
        assert error <= allowed, f"{field}: relative RMS error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("forced", FORCED)
@pytest.mark.parametrize("name", CASES)
def test_values_and_every_gradient(name: str, forced: str, dtype: torch.dtype) -> None:
    assert_matches_definition(name, forced, arguments(name, 63), dtype)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("length", [1, 2, 64, 130])
@pytest.mark.parametrize("name", CASES)
def test_lengths_and_documents(name: str, length: int, documents: bool) -> None:
    given = arguments(name, length)
    assert_matches_definition(
        name, "aten", {**given, "segment_ids": segments(length)} if documents else given, torch.float32
    )


@pytest.mark.parametrize("name", CASES)
def test_what_is_optional_may_be_absent(name: str) -> None:
    optional = {"bias", "initial_state", "activation", "D", "z", "dt_bias", "dt_softplus", "dt_limit", "use_qk_l2norm"}
    given = {n: v for n, v in arguments(name, 33).items() if n not in optional}
    if "key" in given:  # keys of length above 1 make the rule itself grow
        given["key"] = torch.nn.functional.normalize(given["key"], dim=-1)
    if "dt" in given:
        given["dt"] = given["dt"].abs()
    assert_matches_definition(name, "aten", given, torch.float32)


@pytest.mark.parametrize(("name", "forced"), CASES_FORWARD)
def test_parts_chained_by_their_state_are_the_whole(name: str, forced: str) -> None:
    given, run = {**arguments(name, 70), "segment_ids": segments(70)}, operation(name, forced)
    # two parts meet within a document
    given["segment_ids"][:, 29:42] = 7
    whole, state, outputs = run(**given), given["initial_state"], []
    for start, stop in ((0, 30), (30, 40), (40, 41), (41, 70)):
        result = run(**{**part(given, start, stop), "initial_state": state})
        outputs.append(result.outputs)
        state = result.final_state
    torch.testing.assert_close(torch.cat(outputs, 1), whole.outputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, whole.final_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "forced"), CASES_FORWARD)
def test_documents_do_not_leak(name: str, forced: str) -> None:
    given, run = arguments(name, 50), operation(name, forced)
    ids = torch.tensor([3] * 13 + [9] * 20 + [3] * 17).expand(2, 50)
    packed, state = run(**given, segment_ids=ids), given["initial_state"]
    for start, stop in ((0, 13), (13, 33), (33, 50)):
        alone = run(**{**part(given, start, stop), "initial_state": state})
        torch.testing.assert_close(packed.outputs[:, start:stop], alone.outputs, rtol=1e-4, atol=1e-5)
        state = None
    torch.testing.assert_close(packed.final_state, alone.final_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "forced"), CASES_FORWARD)
def test_documents_shorter_than_a_state_holds(name: str, forced: str) -> None:
    given, run = arguments(name, 8), operation(name, forced)
    packed = run(**given, segment_ids=torch.tensor([3] * 6 + [9] * 2).expand(2, 8))
    alone = run(**{**part(given, 6, 8), "initial_state": None})
    torch.testing.assert_close(packed.outputs[:, 6:], alone.outputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed.final_state, alone.final_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "forced"), CASES_FORWARD)
def test_an_initial_state_of_any_strides(name: str, forced: str) -> None:
    given, run = arguments(name, 5), operation(name, forced)
    state = given["initial_state"]
    for strided in (
        state.transpose(1, 2).contiguous().transpose(1, 2),
        state.expand(1, *state.shape)[0].flip(1).flip(1),
    ):
        result, wanted = run(**{**given, "initial_state": strided}), run(**given)
        torch.testing.assert_close(result.outputs, wanted.outputs)
        torch.testing.assert_close(result.final_state, wanted.final_state)


@pytest.mark.parametrize("forced", FORCED)
@pytest.mark.parametrize(("name", "decay"), [("ssm1", "A"), ("ssm2", "A"), ("gated_delta_rule", "g"), (CHANNELS, "g")])
@pytest.mark.parametrize("strength", [0.0, 40.0, 1e4])
def test_decays_of_any_strength(name: str, decay: str, forced: str, strength: float) -> None:
    """Quotients of cumulative products would overflow, and float32 running sums lose the weak decays between."""
    given = arguments(name, 150)
    mixed = torch.rand(given[decay].shape, generator=torch.Generator().manual_seed(0)) < 0.5
    given[decay] = torch.where(mixed, -strength, 0.01 * given[decay])
    assert_matches_definition(name, forced, given, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [1, 3, 150])
@pytest.mark.parametrize("forced", FORCED)
def test_a_decay_of_nothing(forced: str, length: int, dtype: torch.dtype) -> None:
    """g = -inf forgets the state: not NaN, as minus infinity less itself would be. So does any g below -745."""
    given = arguments("gated_delta_rule", length)
    generator = torch.Generator().manual_seed(3)
    for decay in (float("-inf"), -1e30, -800.0):
        forgotten = torch.rand(given["g"].shape, generator=generator) < 0.3
        given["g"] = torch.where(forgotten, decay, given["g"])
        wide = {n: v.to(dtype) if floating(v) else v for n, v in given.items()}
        expected = results(DEFINITION["gated_delta_rule"], wide, torch.float64, dtype)
        for field, got in results(operation("gated_delta_rule", forced), wide, dtype, dtype).items():
            assert got.isfinite().all(), field
            assert relative_rms_error(got, expected[field]) <= (1e-5 if dtype == torch.float32 else 1e-10), field


@pytest.mark.parametrize("forced", FORWARD)
@pytest.mark.parametrize(("name", "decay"), [("ssm1", "A"), ("ssm2", "A")])
@pytest.mark.parametrize("length", [1, 20, 150])
def test_a_state_that_is_never_kept(name: str, decay: str, forced: str, length: int) -> None:
    given = arguments(name, length)
    given["dt"] = given["dt"].abs() + 0.1
    given[decay] = torch.full_like(given[decay], float("-inf"))
    got = operation(name, forced)(**given)
    expected = DEFINITION[name](**{n: v.double() if floating(v) else v for n, v in given.items()})
    for result, want in zip((got.outputs, got.final_state), expected, strict=True):
        assert relative_rms_error(result, want) <= 1e-5


@pytest.mark.parametrize("forced", FORCED)
@pytest.mark.parametrize("name", CASES)
def test_zeros(name: str, forced: str) -> None:
    given = {n: torch.zeros_like(v) if floating(v) else v for n, v in arguments(name, 20).items()}
    for field, got in results(operation(name, forced), given, torch.float32, torch.float32).items():
        assert got.isfinite().all(), field
        if field == "outputs":
            assert not got.any()


@pytest.mark.parametrize("name", CASES)
def test_an_empty_batch(name: str) -> None:
    result = operation(name)(**arguments(name, 5, batch=0))
    assert result.outputs.shape[:2] == (0, 5) and result.final_state.shape[0] == 0


@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("name", CASES)
def test_compiles_to_one_graph(name: str, length: int) -> None:
    given, run = {**arguments(name, length), "segment_ids": segments(length)}, operation(name)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got, want = (results(function, given, torch.float32, torch.float32) for function in (compiled, run))
    for field in want:
        torch.testing.assert_close(got[field], want[field], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_exports(name: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, given: Arguments) -> StateSpaceOutput:
            return operation(name)(**given)

    given = arguments(name, 20)
    tensors = {n: v for n, v in given.items() if isinstance(v, Tensor)}
    exported = torch.export.export(Module(), (tensors,)).module()(tensors)
    torch.testing.assert_close(exported.outputs, operation(name)(**tensors).outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_autocast_leaves_the_state_wide(name: str) -> None:
    given, run = arguments(name, 70), operation(name)
    want = run(**given)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(**given)
    torch.testing.assert_close(got.outputs, want.outputs)
    torch.testing.assert_close(got.final_state, want.final_state)


@pytest.mark.parametrize("name", CASES)
def test_activation_checkpointing(name: str) -> None:
    given, run = arguments(name, 40), operation(name)
    checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, run, use_reentrant=False)
    got, want = (results(function, given, torch.float32, torch.float32) for function in (checkpointed, run))
    for field in want:
        torch.testing.assert_close(got[field], want[field])


@pytest.mark.parametrize("name", CASES)
def test_vmap_and_functional_gradients(name: str) -> None:
    given, run = arguments(name, 20, batch=1), operation(name)
    tensors = {n: v for n, v in given.items() if floating(v)}
    rest = {n: v for n, v in given.items() if n not in tensors}
    stacked = {n: torch.stack([v, 0.5 * v, 0.2 * v]) for n, v in tensors.items()}
    shared = tensors.get("A", tensors.get("weight", tensors.get("beta")))  # one argument for all
    key = next(n for n, v in tensors.items() if v is shared)
    dims = {n: None if n == key else 0 for n in tensors}

    def loss(tensors: Arguments) -> Tensor:
        result = run(**tensors, **rest)
        return result.outputs.square().sum() + result.final_state.square().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(dims,))({**stacked, key: shared})
    for i in range(3):
        want = torch.func.grad(loss)({n: shared if n == key else v[i] for n, v in stacked.items()})
        for n in tensors:
            torch.testing.assert_close(got[n][i], want[n], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_the_differential_mode_agrees(name: str, compared: list[str]) -> None:
    for dtype in DTYPES:
        operation(name)(**{n: v.to(dtype) if floating(v) else v for n, v in arguments(name, 90).items()})
    assert compared == [f"{name.split()[0]}:{operation(name).choose(**arguments(name, 90)).backend}"] * len(DTYPES)


@pytest.mark.parametrize("name", CASES)
def test_results_serialize_and_keep_the_runtime_dtype(name: str) -> None:
    given = arguments(name, 3)
    run = OperationRegistry.create(name.split()[0], OperationMetadata(runtime_dtype=torch.bfloat16))
    result = run(**given)
    assert result.outputs.dtype == torch.bfloat16 and result.final_state.dtype == torch.float32
    again = StateSpaceOutput.from_json(result.to_json())
    assert torch.equal(again.outputs, result.outputs) and torch.equal(again.final_state, result.final_state)


@pytest.mark.parametrize("name", CASES)
def test_every_platform_has_an_answer(name: str) -> None:
    args, kwargs = OperationRegistry.get(name.split()[0]).typical_call()
    for platform in PLATFORMS:
        assert operation(name).choose_on(platform, args, kwargs).backend in operation(name).backends()
    given = arguments(name, 4)
    first = next(iter(given))
    in_training = operation(name).choose(**{**given, first: given[first].requires_grad_()}).backend
    assert in_training == "aten" or (in_training == "cpu" and name != CHANNELS)


@pytest.mark.parametrize(("name", "forced"), CASES_FORWARD)
def test_errors_name_what_is_wrong(name: str, forced: str) -> None:
    given, run, name = arguments(name, 4), operation(name, forced), name.split()[0]
    with pytest.raises(ValueError, match=rf"{name}: initial_state must be \(.*, got \(1,\)"):
        run(**{**given, "initial_state": torch.zeros(1)})
    with pytest.raises(ValueError, match=rf"{name}: segment_ids must be integers \(2, 4\), got \(2, 3\)"):
        run(**given, segment_ids=torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="integers"):
        run(**given, segment_ids=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="at least one token"):
        run(**part(given, 0, 0))
    first = next(iter(given))
    with pytest.raises(ValueError, match="floating"):
        run(**{**given, first: given[first].to(torch.int64)})
