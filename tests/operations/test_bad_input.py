"""Bad input: a sample of scripts/fuzz_operations.py, and of each kind of mistake the message."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from easytorch.operations import OperationMetadata, OperationRegistry

SCRIPT = Path(__file__).parents[2] / "scripts/fuzz_operations.py"
_spec = importlib.util.spec_from_file_location("fuzz_operations", SCRIPT)
assert _spec is not None and _spec.loader is not None
fuzz = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fuzz)

SEED = 20
CASES: dict[str, list[Any]] = {}
for _case in fuzz.cases():
    CASES.setdefault(_case.operation, []).append(_case)


def run(name: str, backend: str | None, arguments: dict[str, Any], **metadata: Any) -> Any:
    return OperationRegistry.create(name, OperationMetadata(backend=backend, **metadata))(**arguments)


def backends(name: str) -> list[str | None]:
    return fuzz.implementations(name)


def test_every_operation_has_a_call_that_fits() -> None:
    assert set(CASES) == {OperationRegistry.get(name).primary_name() for name in OperationRegistry.names()}
    for case in fuzz.cases():
        assert fuzz.carries(case, "native"), case.operation


def test_a_sample_of_wrong_arguments() -> None:
    failures = [str(failure) for failure in fuzz.sample(SEED, 100)]
    assert not failures, f"seed {SEED}:\n" + "\n".join(failures)


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_on_another_device(name: str) -> None:
    for case in CASES[name]:
        tensors = [n for n, x in case.arguments.items() if isinstance(x, Tensor)]
        for argument in tensors[1:]:
            wrong = {**case.arguments, argument: case.arguments[argument].to("meta")}
            for backend in filter(lambda b: fuzz.carries(case, b), backends(name)):
                with pytest.raises(ValueError, match=f"{argument}|latent|rope|key_pages") as raised:
                    run(name, backend, wrong)
                assert "meta" in str(raised.value), (argument, backend)


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_sparse(name: str) -> None:
    for case in CASES[name][:1]:
        for argument, tensor in case.arguments.items():
            if not isinstance(tensor, Tensor) or tensor.dim() == 0 or OperationRegistry.get(name).takes_sparse:
                continue
            for wrong in (tensor.to_sparse(), *([tensor.to_sparse_csr()] if tensor.dim() == 2 else [])):
                for backend in filter(lambda b: fuzz.carries(case, b), backends(name)):
                    with pytest.raises(ValueError, match=rf"({argument} must be|takes plain) dense.*torch\.sparse"):
                        run(name, backend, {**case.arguments, argument: wrong})


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_as_something_else(name: str) -> None:
    for case in CASES[name]:
        for argument in [n for n, x in case.arguments.items() if isinstance(x, Tensor)]:
            for backend in filter(lambda b: fuzz.carries(case, b), backends(name)):
                for wrong in ("no tensor", 1.5, [1.0]):
                    with pytest.raises(TypeError, match=argument):
                        run(name, backend, {**case.arguments, argument: wrong})


@pytest.mark.parametrize("name", CASES)
def test_too_many_positional_arguments_and_unknown_names(name: str) -> None:
    arguments = CASES[name][0].arguments
    with pytest.raises(TypeError, match=r"positional arguments \(.*give the others by name"):
        OperationRegistry.create(name)(*arguments.values(), *[None] * 20)
    for backend in filter(lambda b: fuzz.carries(CASES[name][0], b), backends(name)):
        with pytest.raises(TypeError, match="colour"):
            run(name, backend, {**arguments, "colour": 1})


ATTENTIONS = ("attention", "vanilla", "sdpa", "flash", "blocksparse", "ring", "decode")
QKV = {"query": torch.ones(2, 1, 4, 8), "key": torch.ones(2, 5, 2, 8), "value": torch.ones(2, 5, 2, 8)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sliding_window": 3.5}, TypeError, r"sliding_window must be an integer, or a pair .* got 3\.5"),
        ({"sliding_window": (1.5, 2)}, TypeError, "sliding_window"),
        ({"sliding_window": True}, TypeError, "sliding_window"),
        ({"dropout_prob": -0.1}, ValueError, r"dropout_prob must be in \[0, 1\), got -0\.1"),
        ({"dropout_prob": float("nan")}, ValueError, "dropout_prob"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale"),
        ({"softmax_scale": float("inf")}, ValueError, "softmax_scale must be finite"),
        ({"softmax_scale": "0.1"}, TypeError, "softmax_scale"),
        ({"seed": 1.5, "dropout_prob": 0.1}, TypeError, "seed must be an integer, got 1.5"),
        ({n: x.long() for n, x in QKV.items()}, ValueError, "query, key, value must be floating"),
        ({n: x[..., :0] for n, x in QKV.items()}, ValueError, "head_dim must be at least 1"),
        (
            {"query_segment_ids": torch.zeros(2, 1), "key_segment_ids": torch.zeros(2, 5)},
            ValueError,
            "query_segment_ids must be integers",
        ),
        ({"mask": torch.ones(5, dtype=torch.bool, device="meta")}, ValueError, "mask is on meta and query on cpu"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_what_no_attention_takes(name: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    for backend in backends(name):
        if (name, backend) == ("ring", "aten") and not {"mask", "query_segment_ids"}.isdisjoint(change):
            continue  # it takes none of them
        if (name, backend) in (("flash", "cpu"), ("attention", "flash:cpu")) and "query_segment_ids" in change:
            continue  # flash's operator in C++ refuses segments before it looks at them
        with pytest.raises(error, match=message):
            run(name, backend, {**QKV, **change})


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_empty_batch_is_an_empty_result(name: str) -> None:
    given = {n: x[:0] for n, x in QKV.items()}
    for backend in backends(name):
        if backend is None or fuzz.carries(fuzz.Case(name, QKV), backend):
            assert run(name, backend, given).attention_outputs.shape == (0, 1, 4, 8)


@pytest.mark.parametrize("backend", ["native", "aten", None])
def test_lengths_group_sizes_and_positions_out_of_range(backend: str | None) -> None:
    for lengths in ([6, 1], [-1, 2]):
        for many in (1, 9):
            given = {n: x.repeat(many, 1, 1, 1) for n, x in QKV.items()}
            with pytest.raises(ValueError, match=r"decode: lengths must be in 0\.\.5"):
                run("decode", backend, {**given, "lengths": torch.tensor(lengths * many)})
    x, weight = torch.ones(4, 3), torch.ones(2, 3, 5)
    for sizes in ([3, 2], [-1, 2], [2**62, 2**62], [2**63 - 1, 1]):  # some overflow when they are added
        with pytest.raises(ValueError, match="group_sizes must not be negative nor sum to more than the 4 rows"):
            run("grouped_matmul", backend, {"x": x, "weight": weight, "group_sizes": torch.tensor(sizes)})
    heads, table = torch.ones(2, 10, 1, 4), torch.ones(20, 4)
    for position in (-1, 20):
        ids = torch.arange(10).repeat(2, 1)
        ids[1, 3] = position
        with pytest.raises(ValueError, match=rf"position_ids must be in 0\.\.19, .* got .*{position}"):
            run("rotary", backend, {"query": heads, "key": heads, "cos": table, "sin": table, "position_ids": ids})
    for offset in (-1, 2.0, 11):
        with pytest.raises((ValueError, TypeError), match="offset"):
            run("rotary", backend, {"query": heads, "key": heads, "cos": table, "sin": table, "offset": offset})


FLAGS = {
    "gated_delta_rule": "use_qk_l2norm", "grouped_matmul": "transposed", "rotary": "interleaved", "ssm1": "dt_softplus",
    "ssm2": "dt_softplus",
}  # fmt: skip
CAUSAL = (*ATTENTIONS, "multi_latent_attention", "ragged_page_attention", "ragged_page_multi_latent_attention")


@pytest.mark.parametrize("name", CASES)
def test_what_is_neither_true_nor_false(name: str) -> None:
    """Any word, "no" too, would count as True."""
    flag = "causal" if name in CAUSAL else FLAGS.get(name)
    assert [f for _, f in OperationRegistry.get(name)._flags] == ([flag] if flag else [])
    arguments = CASES[name][0].arguments
    for wrong in ("no", 2, 0.0, [], Tensor([1, 0])) if flag else ():
        for backend in filter(lambda b: fuzz.carries(CASES[name][0], b), backends(name)):
            with pytest.raises(TypeError, match=f"{flag} must be True or False, got"):
                run(name, backend, {**arguments, flag: wrong})
    for right in (True, np.bool_(True), 1, torch.tensor(True)) if flag == "causal" else ():
        run(name, None, {**arguments, flag: right})


@pytest.mark.parametrize(
    "settings",
    [
        {"softmax_scale": float("nan")}, {"softmax_scale": float("inf")}, {"softmax_scale": "1"},
        {"softmax_scale": True}, {"dropout_prob": "0.1"}, {"dropout_prob": None}, {"backend": 3},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_no_call_could_take(settings: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(settings))):
        OperationMetadata(**settings)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_eps(name: str) -> None:
    for backend in backends(name):
        for eps in (-1e-6, float("nan"), float("inf"), None, "1e-6"):
            with pytest.raises((ValueError, TypeError), match="eps"):
                run(name, backend, {"x": torch.ones(2, 4), "eps": eps})


def test_checks_of_numbers_wait_for_no_device_and_break_no_graph() -> None:
    """Traced, the numbers are not at hand: the call is compiled whole."""
    from easytorch.kernels.interop.arguments import bounds

    torch._dynamo.reset()
    seen: list[Any] = []

    @torch.compile(fullgraph=True, backend="aot_eager")
    def traced(x: Tensor) -> Tensor:
        seen.append(bounds(x))
        return x + 1

    traced(torch.tensor([1, 2]))
    assert seen == [None] and bounds(torch.tensor([1, 2], device="meta")) is None
    assert bounds(torch.arange(3, 40)) == (3, 39) and bounds(torch.tensor([5, -2])) == (-2, 5)
    assert bounds(torch.tensor([], dtype=torch.int64)) is None
