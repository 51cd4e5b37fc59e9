"""`AttentionCall`: what a feature of attention touches, and that a record survives operators, jax and cutting."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from easytorch.kernels.attention import native
from easytorch.kernels.attention.call import (
    COMMON,
    DIFFERENTIABLE,
    TENSORS,
    AttentionCall,
    flatten,
    gradients_by_field,
    schema,
    unflatten,
)
from easytorch.kernels.attention.contract import FEATURES as FEATURES_OF_CONTRACT
from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.cpu import library, processor
from easytorch.kernels.ragged_page.contract import FEATURES as FEATURES_OF_PAGES
from easytorch.operations import OperationRegistry
from easytorch.operations.attention import impl
from easytorch.operations.attention.impl import AttentionFeatures, AttentionImpl
from easytorch.operations.attention.ragged_page import PagedImpl
from easytorch.operations.dispatch.impl import UnsupportedOperationError

ROOT = Path(__file__).parents[3]
FEATURES = {"softcap", "sinks"}  # two that nothing else is called
ROOMS = (
    "kernels/attention", "kernels/blocksparse", "kernels/decode", "kernels/decoder_step", "kernels/multi_latent",
    "kernels/ragged_page", "kernels/ring", "easytorch/operations", "easytorch/operations/attention", "easytorch/layers",
)  # fmt: skip

# The functions that take these two one by one, and why the record does not do.
ONE_BY_ONE = {
    ("kernels/attention/contract.py", "resolve"): "it makes the record of them",
    ("kernels/attention/contract.py", "_check_features"): "it checks each",
    ("kernels/attention/contract.py", "check_sinks"): "it checks one",
    ("kernels/attention/contract.py", "check_softcap"): "it checks one",
    ("kernels/ragged_page/contract.py", "resolve_features"): "it makes the record of them",
    ("kernels/attention/jax_flash.py", "sink_weights"): "arithmetic of a part of a call: what the sinks take of a row",
    ("kernels/attention/logsumexp.py", "sink_share"): "arithmetic of a part of a call: what the sinks take of a row",
    **dict.fromkeys(
        [
            ("kernels/decode/triton_kernels.py", "decode_split"),
            ("kernels/decode/triton_kernels.py", "decode_merge"),
            ("kernels/attention/triton_flash_forward.py", "flash_forward"),
            ("kernels/blocksparse/triton_forward.py", "blocksparse_forward"),
            ("kernels/ragged_page/triton_kernels.py", "ragged_forward"),
        ],
        "a Triton kernel takes its arguments one by one",
    ),
    ("easytorch/layers/causal_loss.py", "causal_lm_loss"): "the softcap of logits, not of scores",
    ("easytorch/layers/token_loss.py", "finished"): "the softcap of logits, not of scores",
    ("easytorch/layers/attention.py", "attend"): "the signature that transformers calls",
    ("easytorch/layers/grouped_attention.py", "__init__"): "a model's setting, made once with the layer",
}


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    given = function.args
    return {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def test_a_feature_is_a_field_of_the_record_and_not_a_parameter_of_everything() -> None:
    found = set()
    for room in ROOMS:
        for path in sorted((ROOT / room).glob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text()))
            functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.Lambda))
            name = str(path.relative_to(ROOT))
            found |= {(name, getattr(n, "name", "lambda")) for n in functions if _parameters(n) & FEATURES}
    assert found == ONE_BY_ONE.keys()


def test_every_operator_of_attention_takes_the_record() -> None:
    names = (
        "attention.aten_op", "attention.jax_op", "attention.triton_flash", "blocksparse.aten_op",
        "blocksparse.triton_op", "decode.triton_op", "ragged_page.opaque", "ragged_page.triton_op", "ring.operators",
    )  # fmt: skip
    for module in (importlib.import_module(f"easytorch.kernels.{name}") for name in names):
        operators = [x for x in vars(module).values() if isinstance(x, torch.library.CustomOpDef)]
        assert operators, module
        for operator in operators:
            arguments = [argument.name for argument in operator._opoverload._schema.arguments]
            first = arguments.index(AttentionCall._fields[0])
            assert tuple(arguments[first : first + len(AttentionCall._fields)]) == AttentionCall._fields, operator


@pytest.mark.parametrize("name", ["flash", "decode", "ragged_page", "attention_step"])
def test_the_operators_in_cpp_take_the_record_too(name: str) -> None:
    if library.missing() is not None:
        pytest.skip(library.missing() or "")
    shown = str(getattr(torch.ops.easytorch_cpu, name).default._schema)
    assert f", {schema().replace('SymInt', 'int')}, " in shown


@pytest.mark.parametrize("name", [name for name in OperationRegistry.names() if "ragged" in name])
def test_operations_over_pages_refuse_every_feature_outside_their_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = OperationRegistry.create(name)
    assert isinstance(operation, PagedImpl)
    arguments, keywords = operation.typical_call() or ((), {})
    for call in (operation, operation.choose, operation.forward_native):
        with pytest.raises(TypeError, match=rf"{name}(\(\))? got an unexpected keyword argument 'temperature'; it"):
            call(*arguments, **keywords, temperature=2.0)
    monkeypatch.setitem(AttentionFeatures.__annotations__, "temperature", "float | None")
    known = type(operation)._keywords
    monkeypatch.setattr(type(operation), "_keywords", None if known is None else known | {"temperature"})
    for call in (operation, operation.choose, operation.forward_native):
        with pytest.raises(UnsupportedOperationError, match=f"{name} does not take temperature: its features are"):
            call(*arguments, **keywords, temperature=2.0)


def test_a_feature_that_a_kernel_does_not_name_is_refused_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new field does at first: only the definitions take it."""
    monkeypatch.setattr(impl, "BEYOND_COMMON", ("temperature",))
    asked = 0
    for name in OperationRegistry.names():
        operation = OperationRegistry.create(name)
        if not isinstance(operation, AttentionImpl) or name == "attention":
            continue
        arguments, keywords = operation.typical_call() or ((), {})
        for backend in operation.backends():
            keywords = {**keywords, "temperature": 2.0}
            reason = operation.supports(backend, *arguments, **keywords)
            if backend == "native" and name != "ring":  # whose blocks are not the definition's code
                assert reason is None
            else:
                assert reason is not None and "temperature" in reason, (name, backend)
                asked += 1
    assert asked >= 10


@pytest.mark.parametrize("rows", [1, 512])
@pytest.mark.parametrize("name", ["attention", "decode", "flash"])
def test_a_feature_that_the_operator_in_cpp_does_not_name_keeps_the_call_from_it(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.missing() is not None or (name == "decode" and rows > 1):
        pytest.skip(library.missing() or "decode takes one query")
    monkeypatch.setattr(processor, "AVX2", True)
    operation = OperationRegistry.create(name)
    query, key = torch.zeros(1, rows, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 512, 2, 64, dtype=torch.bfloat16)
    before = operation.choose(query, key, key, causal=True)
    assert name == "flash" or before.backend == "cpu"
    monkeypatch.setattr(impl, "BEYOND_COMMON", ("temperature",))
    for names in ("_keywords", "_feature_names"):
        monkeypatch.setattr(type(operation), names, getattr(type(operation), names) | {"temperature"})
    choice = operation.choose(query, key, key, causal=True, temperature=2.0)
    assert (choice.backend, operation.choose(query, key, key, causal=True).backend) == ("native", before.backend)


KINDS = get_type_hints(AttentionCall)  # by name of the field


def _full() -> AttentionCall:
    """A record in which every field is given, by its type alone."""
    tensors = (torch.randn(1) for _ in range(TENSORS))
    return AttentionCall(*tensors, *(3 if int in get_args(kind) else 0.5 for kind in [*KINDS.values()][TENSORS:]))


def test_a_record_is_the_flat_arguments_of_an_operator() -> None:
    call = _full()
    assert all(a is b for a, b in zip(unflatten(flatten(call)), call, strict=True))
    integers = dict.fromkeys(AttentionCall._fields[TENSORS:], 2)  # a schema takes no integer for a float
    for (name, kind), number in zip(KINDS.items(), flatten(call._replace(**integers)), strict=True):
        assert isinstance(number, torch.Tensor) or type(number) is (int if int in get_args(kind) else float), name
    assert schema().count(",") == len(AttentionCall._fields) - 1
    fields = dict(zip(AttentionCall._fields, gradients_by_field(dict.fromkeys(DIFFERENTIABLE, 1)), strict=True))
    assert {name for name, x in fields.items() if x is not None} == set(DIFFERENTIABLE)


def test_the_keywords_of_operations_are_the_features_of_the_contract() -> None:
    assert AttentionFeatures.__annotations__.keys() == FEATURES_OF_CONTRACT
    assert COMMON <= FEATURES_OF_CONTRACT and FEATURES_OF_PAGES <= FEATURES_OF_CONTRACT


def test_plain_is_said_of_no_call_with_a_feature() -> None:
    full = _full()
    assert AttentionCall().plain
    for name in AttentionCall._fields:
        if name not in ("key_segment_ids", "seed", "scale", "left", "right"):  # go with another, or are no feature
            assert not AttentionCall()._replace(**{name: getattr(full, name)}).plain, name


@pytest.mark.parametrize(
    "features",
    [
        {"causal": True, "mask": "dense", "softcap": 2.0},
        {"sliding_window": (3, 1), "bias": "rows"},
        {"bias": "columns", "segments": True, "sinks": True},
    ],
    ids=str,
)
def test_the_parts_of_a_call_are_the_call(features: dict[str, Any]) -> None:
    torch.manual_seed(0)
    heads = [torch.randn(2, 9, 2, 4, dtype=torch.float64) for _ in range(3)]
    features = dict(features)
    kinds = {"dense": (2, 1, 9, 9), "rows": (9, 1), "columns": (1, 2, 1, 9)}
    for name in ("mask", "bias"):
        if name in features:
            matrix = torch.randn(kinds[features[name]], dtype=torch.float64)
            features[name] = matrix > -1 if name == "mask" else matrix
    if features.pop("segments", False):
        features |= dict.fromkeys(("query_segment_ids", "key_segment_ids"), torch.arange(9).repeat(2, 1) // 4)
    if features.pop("sinks", False):
        features["sinks"] = torch.randn(2, dtype=torch.float64)
    call = resolve(*heads, **features)
    whole = native.define(*heads, call)[0]
    query, key, value = heads
    last = call.part(slice(5, 9), slice(None))  # the last rows stay aligned with the last key
    torch.testing.assert_close(native.define(query[:, 5:], key, value, last)[0], whole[:, 5:])
    hidden = (torch.arange(9) >= 3).expand(9, 9)
    wanted = native.define(*heads, call._replace(mask=hidden if call.mask is None else call.mask & hidden))[0]
    columns = call.part(slice(None), slice(3, None))
    torch.testing.assert_close(native.define(query, key[:, 3:], value[:, 3:], columns)[0], wanted)


def test_in_jax_tensors_are_traced_and_numbers_are_constants() -> None:
    jax = pytest.importorskip("jax")
    from easytorch.kernels.attention.jax_call import AttentionCall

    traced = []

    @jax.jit
    def scaled(call: Any) -> Any:
        traced.append(call.scale)
        return call.sinks * call.scale if call.softcap is None else call.sinks

    sinks = jax.numpy.ones(3)
    assert scaled(AttentionCall(sinks=sinks, scale=2.0)).tolist() == [2.0] * 3
    assert scaled(AttentionCall(sinks=sinks * 5, scale=2.0)).tolist() == [10.0] * 3
    assert scaled(AttentionCall(sinks=sinks, scale=2.0, softcap=1.0)).tolist() == [1.0] * 3
    assert traced == [2.0, 2.0]
